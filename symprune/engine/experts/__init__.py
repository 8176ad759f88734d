"""Whole experts dropped from a mixture: found, measured, taken out."""
