"""Gradient descent, FedAvg and what it is compared with."""
