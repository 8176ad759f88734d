"""Federated sparse training: the algorithms, the compressors and the engine that runs them."""
