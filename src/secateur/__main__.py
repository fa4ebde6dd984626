"""`python -m secateur` is the `secateur` command."""

from secateur.cli import main

main()
