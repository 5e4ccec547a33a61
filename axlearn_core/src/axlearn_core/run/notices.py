"""Lines for a person."""

import sys

from axlearn_core.errors import escape_controls


def log_message(message: str) -> None:
    """One line for a person, on standard error, from the first process only."""
    import jax  # whoever has a message has JAX; the readers of runs have none

    if jax.process_index() == 0:
        print(escape_controls(message), file=sys.stderr, flush=True)
