"""Clients train some layers and get the others pruned."""
