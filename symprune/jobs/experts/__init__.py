"""Jobs that drop whole experts of a mixture first."""
