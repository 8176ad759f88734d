"""The model card: what a folder says of itself to a reader, and to `symprune repeat`."""
