"""Several models or recipes side by side, so that one can be chosen."""
