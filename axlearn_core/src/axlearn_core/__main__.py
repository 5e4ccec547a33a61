"""Run the `axlearn` command with `python -m axlearn_core`."""

from axlearn_core.cli.main import main

main()
