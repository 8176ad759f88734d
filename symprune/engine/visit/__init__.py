"""One block of the walk: its inputs, its groups of matrices, what is decided about them, and by
which process."""
