"""Run the command `axlearn` with `python -m axlearn_core`."""

from axlearn_core.cli.main import main

main()
