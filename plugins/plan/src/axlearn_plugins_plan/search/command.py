"""`axlearn plan search`."""

import json
import math
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import experiment_argument, no_devices, request_options, to_json_value
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request


@click.command("plan-search", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--budget", metavar="MINUTES", help="Time limit for compilation (default: 10).")
@click.option("--chips", metavar="A..B", help="Search all machine sizes from A to B chips.")
@click.option("--vary", metavar="batch,...", help="Also vary: batch, optimizer-precision.")
@click.option("--front", metavar="N", help="Layouts to compile (default: 12).")
@click.option("--layout-out", metavar="FILE", help="Write the best layout, for `train --layout`.")
@click.option("--png", metavar="FILE", help="Plot memory against time (needs matplotlib).")
@click.option("--html", metavar="FILE", help="Write the table and the plot as HTML.")
@click.option("--cache", metavar="DIR", help="Cache (default: ~/.cache/axlearn/layouts).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with bytes per chip.")
def search(
    request: Request,
    budget: str | None,
    chips: str | None,
    vary: str | None,
    front: str | None,
    layout_out: str | None,
    png: str | None,
    html: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Rank the layouts of a training step, and compile the best.

    Searches the --target machine, or several (--target A,B). Exits with code 1 if no
    layout fits.
    """
    no_devices()
    from axlearn_plugins_plan.search import report
    from axlearn_plugins_plan.search.compile_layouts import Cache, Clock
    from axlearn_plugins_plan.search.machines import machine_names
    from axlearn_plugins_plan.search.rank import parse_vary, spaces
    from axlearn_plugins_plan.search.search import MAX_COMPILED
    from axlearn_plugins_plan.search.search import search as run
    from axlearn_plugins_plan.search.space import VARIED

    if not isinstance(request.experiment, (str, Path)):
        raise RequestError("a search needs an experiment name or a file")
    if png is not None:
        report.require_matplotlib("--png")
    minutes = parse_positive("--budget", budget, 10.0)
    most = int(parse_positive("--front", front, MAX_COMPILED))
    names = machine_names(request.target, chips)
    clock = Clock(budget=60 * minutes)
    folder = Path(cache) if cache else default_cache()
    echo(f"caching compiled figures in {folder}", err=True)
    all_spaces = spaces(request, names, parse_vary(vary, VARIED))
    result = run(request, all_spaces, Cache(folder), clock, most, lambda line: echo(line, err=True))
    if as_json:
        echo(json.dumps(to_json_value(report.as_json(request, result)), indent=2, ensure_ascii=False))
    else:
        echo(report.text(request, result))
    if png is not None:
        report.draw(result, Path(png))
    if html is not None:
        Path(html).write_text(report.page(request, result), encoding="utf-8")
    best = result.rows[0] if result.rows else None
    if best is None or best.compiled is None or not best.compiled.fits:
        raise SystemExit(1)
    if layout_out is not None:
        report.write_layout(request, best, Path(layout_out))


def default_cache() -> Path:
    """Return the path of `axlearn/layouts` in the user's cache directory."""
    import os

    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "axlearn" / "layouts"


def parse_positive(option: str, text: str | None, default: float) -> float:
    """Parse a positive number. Return `default` if the option is unset; raise `RequestError` if the text is invalid."""
    if text is None:
        return default
    try:
        value: Any = float(text)
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or value <= 0:
        raise RequestError(f"{option} expects a positive number\n    got: {text!r}")
    return value
