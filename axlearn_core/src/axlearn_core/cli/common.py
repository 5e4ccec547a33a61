"""What commands share: the options of a request with what a shell completes, and how results are printed."""

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
from axlearn_core.compat import only_cpu
from axlearn_core.plugins.registry import Group, registry

_NARROWEST = 20
"""A column of fewer characters is not wrapped: it would be hard to read."""

json_option = click.option("--json", "as_json", is_flag=True, help='Print JSON: a list of objects with "name".')


def complete_experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed experiments, and as the first word the subcommands of a command; or files if no name begins so.

    Names come from the metadata of installed packages, so that Tab imports nothing of theirs.
    """
    if isinstance(ctx.command, ExtensibleCommand):
        words = [CompletionItem(word) for word in ctx.command.list_commands(ctx) if word.startswith(incomplete)]
        return [*words, *_names("experiments", incomplete)] or [CompletionItem(incomplete, type="file")]
    return _names("experiments", incomplete) or [CompletionItem(incomplete, type="file")]


def complete_features(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed features."""
    return _names("features", incomplete)


def _names(group: Group, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(registry().claims[group]) if name.startswith(incomplete)]


experiment_argument = click.argument("experiment", metavar="EXPERIMENT|FILE.yaml", shell_complete=complete_experiments)
"""The argument of a command that takes `request_options`."""

REQUEST_OPTIONS = (
    click.option(
        "--with",
        "with_",
        multiple=True,
        metavar="FEATURE[:key=value,...]",
        help="Add a feature.",
        shell_complete=complete_features,
    ),
    click.option(
        "--without",
        multiple=True,
        metavar="FEATURE",
        help="Leave out a feature that the file asks for.",
        shell_complete=complete_features,
    ),
    click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value; the path may hold * and **."),
    click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Short for --set max_steps=N."),
    click.option("--target", metavar="NAME", help="The hardware to run on; `none` for no mesh rule."),
    click.option("--layout", metavar="FILE", help="A layout that `axlearn plan search --layout-out` wrote."),
)
"""The options that say what to train, for a command that passes them on."""


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --with, --without, --set, --target, --layout and --steps to a command with an argument `experiment`.

    The command gets a `request` (`axlearn_core.plugins.request.Request`) in their place.
    """

    command = with_request(function)
    for option in reversed(REQUEST_OPTIONS):
        command = option(command)
    return command


def with_request(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` called with a `request` in place of the options of `request_options`."""

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
        request = Request.of(experiment, **options)  # type: ignore[arg-type]
        return function(*args, request=change_request(request), **kwargs)

    return command


def no_devices() -> None:
    """For a command that imports experiments and computes nothing: keeps JAX from looking for accelerators."""
    only_cpu()


def plain(value: object) -> Any:
    """A config value as something that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    exact = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if exact else repr(value)


def print_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """A list of objects."""
    echo(json.dumps([plain(row) for row in rows], indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Aligned columns under a heading; nothing but a note on standard error if there are no rows.

    A terminal gets the last column wrapped to its width.
    """
    if not rows:
        echo("none is installed", err=True)
        return
    texts = [[c.upper() for c in columns], *([str(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in texts) for i in range(len(columns))]
    indent = sum(widths[:-1]) + 2 * (len(columns) - 1)
    for number, line in enumerate(texts):
        first, *more = _wrapped(line[-1], indent)
        cells = zip([*line[:-1], first], widths, strict=True)
        text = "  ".join(cell.ljust(width) for cell, width in cells).rstrip()
        echo(click.style(text, dim=True) if number == 0 else text)
        for rest in more:
            echo(" " * indent + rest)


def _wrapped(text: str, indent: int) -> list[str]:
    """The lines of a table's last cell: broken to the width of a terminal, and whole for a file or a pipe."""
    room = shutil.get_terminal_size().columns - indent
    if not sys.stdout.isatty() or len(text) <= room or room < _NARROWEST:
        return [text]
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
