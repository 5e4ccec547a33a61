"""`axlearn plan --search`."""

import json
import math
from pathlib import Path
from typing import Any

from axlearn_core.cli.common import no_devices, plain
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request


def search(
    enabled: bool,
    *,
    request: Request,
    function: str,
    as_json: bool,
    budget: str | None = None,
    chips: str | None = None,
    vary: str | None = None,
    front: str | None = None,
    layout_out: str | None = None,
    png: str | None = None,
    html: str | None = None,
    cache: str | None = None,
) -> None:
    """Prints the layouts of a training step, the best first; exit code 1 where none fits.

    Args:
        enabled: True.
        request: the experiment, on every machine of `request.target` (`A,B`).
        function: has to be `train`.
        as_json: print one object.
        budget: minutes for compiling.
        chips: `A..B`: also every other size of the targets' machines in this range.
        vary: what else may change, joined by commas.
        front: how many layouts to compile.
        layout_out: the file to write the best layout to.
        png: the file to draw the picture to.
        html: the file to write the page to.
        cache: the directory of compiled figures.
    """
    no_devices()
    from axlearn_plugins_plan.search import report
    from axlearn_plugins_plan.search.compiled import Cache, Clock
    from axlearn_plugins_plan.search.machines import machine_names
    from axlearn_plugins_plan.search.rank import spaces, varied
    from axlearn_plugins_plan.search.search import MOST
    from axlearn_plugins_plan.search.search import search as run
    from axlearn_plugins_plan.search.space import VARIED

    if function != "train":
        raise RequestError(
            f"--search looks for layouts of the training step\n    got: --function {function}\n    fix: leave it out"
        )
    if not isinstance(request.experiment, (str, Path)):
        raise RequestError("--search takes an experiment by name, or a file")
    if png is not None:
        report.require_matplotlib("--png")
    minutes = positive("--budget", budget, 10.0)
    most = int(positive("--front", front, MOST))
    names = machine_names(request.target, chips)
    clock = Clock(budget=60 * minutes)
    folder = Path(cache) if cache else default_cache()
    echo(f"compiled figures are kept in {folder}", err=True)
    all_spaces = spaces(request, names, varied(vary, VARIED))
    result = run(request, all_spaces, Cache(folder), clock, most, lambda line: echo(line, err=True))
    if as_json:
        echo(json.dumps(plain(report.as_json(request, result)), indent=2, ensure_ascii=False))
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
    """`axlearn/layouts` in the user's cache directory."""
    import os

    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "axlearn" / "layouts"


def positive(option: str, text: str | None, default: float) -> float:
    """The number of an option, or `default` where it is not given; raises `RequestError` for what is not positive."""
    if text is None:
        return default
    try:
        value: Any = float(text)
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or value <= 0:
        raise RequestError(f"{option} takes a positive number\n    got: {text!r}")
    return value
