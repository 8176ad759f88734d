"""`python -m symprune`."""

from symprune.cli.main import main

main()
