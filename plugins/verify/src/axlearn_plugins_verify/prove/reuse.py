"""Make what a check needs once for each program, so that a second seed need not compile it again."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from axlearn_core.compose import Program

T = TypeVar("T")


def reuse(program: Program, key: Hashable, make: Callable[[], T]) -> T:
    """Return the object that a program keeps for a key. The first call makes it."""
    if key not in program.attachments:
        program.attachments[key] = make()
    return program.attachments[key]
