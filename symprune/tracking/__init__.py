"""Figures of a run for TensorBoard and Weights & Biases, where they are installed."""
