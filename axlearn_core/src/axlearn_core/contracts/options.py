"""`CommandOption`: an option that a plugin adds to an existing command. This module does not import JAX."""

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class CommandOption:
    """An option that modifies a command's request, such as `axlearn train --shadow`.

    Register it as `COMMAND--OPTION` (`train--shadow`) in the `axlearn.options` entry-point group. Its module must not import
    JAX, because it is imported whenever the command parses its options.

    Attributes:
        help: One line for `--help`.
        change: Receives the value of the option (True for a flag) and the `Request`, and returns the new request.
        metavar: Placeholder for the value in `--help`. None makes the option a flag.
    """

    help: str
    change: Callable[[Any, Any], Any]
    metavar: str | None = None
