"""Measuring: perplexity, zero-shot tasks, tables and reports."""
