"""An option that a plugin adds to a command of another distribution. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from axlearn_core.plugins.request import Request


@attrs.frozen(kw_only=True)
class CommandOption:
    """An option that changes the request of a command, such as `axlearn train --shadow`.

    A distribution registers it as `COMMAND--OPTION` (`train--shadow`) in the entry-point group `axlearn.options`. The module
    is imported whenever the command parses its options, so it imports no JAX.

    Attributes:
        help: one line for `--help`.
        change: takes the value of the option (True for a flag) and the request, and returns the request to run instead.
        metavar: stands for the value in `--help`; None makes the option a flag.
    """

    help: str
    change: Callable[[Any, Request], Request]
    metavar: str | None = None
