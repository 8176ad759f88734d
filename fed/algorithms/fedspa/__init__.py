"""One dense model, a sparse mask per client."""
