"""What commands print: values of configs, names of files and texts of models may hold what steers a terminal."""

import re
import sys

import click

_STYLE = re.compile(r"(\x1b\[(?:[012]|3[1-7]|9[0-7])m)")
"""What `click.style` writes: colours, bold, dim, and their end."""


def echo(text: object = "", *, err: bool = False) -> None:
    """Prints a line. A terminal gets control characters as escapes such as `\\x1b`; a file or a pipe gets them as they are,
    without colours.
    """
    stream = sys.stderr if err else sys.stdout
    shown = visible(str(text)) if stream.isatty() else _STYLE.sub("", str(text))
    click.echo(shown, err=err, color=True)  # else click removes every escape sequence from what goes to a pipe


def visible(text: str) -> str:
    """`text` with control characters as escapes, but for colours."""
    from axlearn_core.errors import escape_controls

    parts = _STYLE.split(text)
    return "".join(part if index % 2 else escape_controls(part) for index, part in enumerate(parts))
