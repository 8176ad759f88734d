"""Secure sums: a server learns the sum of the clients' vectors, also when some of them are gone.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (2017): masks
that cancel in pairs, a second mask of each client's own, and secret shares of what makes both. With
many clients the sparse graph of Bell et al., Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead (2020). What is promised, to whom, is in docs/threat-model.md.
"""
