"""Helpers for commands: request options, shell completion, and result printing."""

import functools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from axlearn_core.cli.extensible import ExtensibleCommand, change_request
from axlearn_core.cli.terminal import echo
from axlearn_core.compat import use_cpu
from axlearn_core.plugins.registry import Group, registry

_MIN_WIDTH = 20
"""Minimum width of a wrapped column, in characters. Narrower columns would be hard to read."""

json_option = click.option("--json", "as_json", is_flag=True, help='Print a JSON list of objects, each with a "name".')


def complete_experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of experiments and subcommands, or files if no name matches.

    Names are read from package metadata, so completion does not import plugins.
    """
    if isinstance(ctx.command, ExtensibleCommand):
        words = [CompletionItem(word) for word in ctx.command.list_commands(ctx) if word.startswith(incomplete)]
        return [*words, *_names("experiments", incomplete)] or [CompletionItem(incomplete, type="file")]
    return _names("experiments", incomplete) or [CompletionItem(incomplete, type="file")]


def complete_features(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of installed features."""
    return _names("features", incomplete)


def _names(group: Group, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(registry().claims[group]) if name.startswith(incomplete)]


experiment_argument = click.argument("experiment", metavar="EXPERIMENT|FILE.yaml", shell_complete=complete_experiments)
"""Argument for commands that use `request_options`."""

REQUEST_OPTIONS = (
    click.option(
        "--with",
        "with_",
        multiple=True,
        metavar="FEATURE[:key=value,...]",
        help="Add a feature; repeatable.",
        shell_complete=complete_features,
    ),
    click.option(
        "--without",
        multiple=True,
        metavar="FEATURE",
        help="Remove a feature that the file or the mesh rule adds; repeatable.",
        shell_complete=complete_features,
    ),
    click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value; PATH may contain * and **."),
    click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Short for --set max_steps=N."),
    click.option("--target", metavar="NAME", help="Target hardware; `none` disables mesh rules."),
    click.option("--layout", metavar="FILE", help="Layout from `plan search --layout-out`."),
)
"""Options that define the request. Commands that forward the options use them directly."""


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --with, --without, --set, --target, --layout and --steps to a command that has an `experiment` argument.

    The command receives a `request` (`axlearn_core.plugins.request.Request`) in place of these options and the argument.
    """

    command = with_request(function)
    for option in reversed(REQUEST_OPTIONS):
        command = option(command)
    return command


def with_request(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the options from `request_options` to a `request` argument for `function`."""

    @functools.wraps(function)
    def command(
        *args: object,
        experiment: str,
        with_: Sequence[str],
        without: Sequence[str],
        set_: Sequence[str],
        steps: int | None,
        target: str | None,
        layout: str | None,
        **kwargs: object,
    ) -> Any:
        from axlearn_core.plugins.request import Request

        options = {"with_": with_, "without": without, "set": set_, "steps": steps, "target": target, "layout": layout}
        request = Request.from_arguments(experiment, **options)  # type: ignore[arg-type]
        return function(*args, request=change_request(request), **kwargs)

    return command


def no_devices() -> None:
    """Restrict JAX to the CPU. Call this in commands that import experiments but do not compute."""
    use_cpu()


def to_json_value(value: object) -> Any:
    """Convert a config value to a JSON-serializable value."""
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json_value(v) for v in value]
    exact = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if exact else repr(value)


def print_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a JSON list of objects."""
    echo(json.dumps([to_json_value(row) for row in rows], indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print aligned columns with a header. If there are no rows, print a note to standard error.

    On a terminal, the last column is wrapped.
    """
    if not rows:
        echo("none are installed", err=True)
        return
    texts = [[c.upper() for c in columns], *([str(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in texts) for i in range(len(columns))]
    indent = sum(widths[:-1]) + 2 * (len(columns) - 1)
    for number, line in enumerate(texts):
        first, *continuation = _wrap_text(line[-1], indent)
        cells = zip([*line[:-1], first], widths, strict=True)
        text = "  ".join(cell.ljust(width) for cell, width in cells).rstrip()
        echo(click.style(text, dim=True) if number == 0 else text)
        for text in continuation:
            echo(" " * indent + text)


def _wrap_text(text: str, indent: int) -> list[str]:
    """Wrap the last cell of a row to the width of the terminal. Do not wrap text for files and pipes."""
    room = shutil.get_terminal_size().columns - indent
    if not sys.stdout.isatty() or len(text) <= room or room < _MIN_WIDTH:
        return [text]
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
