"""Lines for a person."""

import sys

from axlearn_core.errors import escape_controls


def log_message(message: str, *, from_all: bool = False) -> None:
    """One line for a person, on standard error, from the first process only.

    Args:
        message: the line.
        from_all: every process that calls writes it.
    """
    import jax  # whoever has a message has JAX; the readers of runs have none

    if from_all or jax.process_index() == 0:
        print(escape_controls(message), file=sys.stderr, flush=True)
