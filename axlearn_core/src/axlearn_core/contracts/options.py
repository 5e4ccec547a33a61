"""An option that a plugin adds to a command of another distribution. Imports no JAX."""

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class CommandOption:
    """An option that changes the request of a command, such as `axlearn train --shadow`.

    A distribution registers it as `COMMAND--OPTION` (`train--shadow`) in the entry-point group `axlearn.options`. The module
    is imported whenever the command parses its options, so it imports no JAX.

    Attributes:
        help: one line for `--help`.
        change: takes the value of the option (True for a flag) and the `Request`, and returns the request to run instead.
        metavar: stands for the value in `--help`; None makes the option a flag.
    """

    help: str
    change: Callable[[Any, Any], Any]
    metavar: str | None = None
