"""Messages on standard error."""

import sys

from axlearn_core.compat import process_index
from axlearn_core.errors import escape_controls


def log_message(message: str, *, from_all: bool = False) -> None:
    """Print a message to standard error, on process 0 only.

    Args:
        message: The message.
        from_all: Print on every process.
    """
    if from_all or process_index() == 0:
        print(escape_controls(message), file=sys.stderr, flush=True)
