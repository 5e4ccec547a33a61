"""`python -m axlearn_core` is the command `axlearn`."""

from axlearn_core.cli.main import main

main()
