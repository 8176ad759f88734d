"""`python -m symprune`."""

from symprune.cli import main

main()
