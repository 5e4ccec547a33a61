"""`python -m axlearn_core.cli`."""

from axlearn_core.cli.main import main

main()
