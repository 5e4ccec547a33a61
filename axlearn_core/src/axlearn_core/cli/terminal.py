"""Print safely to terminals. Config values, file names, and generated text may contain control characters."""

import re
import sys

import click

_STYLE = re.compile(r"(\x1b\[(?:[012]|3[1-7]|9[0-7])m)")
"""Escape sequences of `click.style`: colors, bold, dim, and reset."""


def echo(text: object = "", *, err: bool = False) -> None:
    """Print a line.

    On terminals, escape control characters, for example as `\\x1b`. In files and pipes, keep them but remove colors.
    """
    stream = sys.stderr if err else sys.stdout
    shown = visible(str(text)) if stream.isatty() else _STYLE.sub("", str(text))
    click.echo(shown, err=err, color=True)  # otherwise click removes all escape sequences in pipes


def visible(text: str) -> str:
    """Escape control characters in text, except color codes."""
    from axlearn_core.errors import escape_controls

    parts = _STYLE.split(text)
    return "".join(part if index % 2 else escape_controls(part) for index, part in enumerate(parts))
