"""`axlearn config bisect`."""

import json
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.terminal import echo

_STEPS, _SEEDS, _MAX_STEPS = 50, 3, 1000


@click.command()
@click.argument("first", metavar="RUN_A")
@click.argument("second", metavar="RUN_B")
@click.option(
    "--over",
    type=click.Choice(["configs", "steps"]),
    default="configs",
    show_default=True,
    help="Bisect the config changes between the runs, or find the first step that differs.",
)
@click.option("--metric", metavar="NAME", help="Name of a scalar of each step (default: loss; over steps: any scalar).")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help=f"Steps per training run (default: {_STEPS}); over steps: maximum number of steps to run again "
    f"(default: {_MAX_STEPS}).",
)
@click.option("--seeds", type=click.IntRange(min=2), help=f"Number of seeds per config (default: {_SEEDS}).")
@click.option(
    "--max-runs",
    "--most",
    "max_runs",
    type=click.IntRange(min=0),
    default=60,
    show_default=True,
    help="Maximum number of training runs; over steps: of re-runs, and 0 only searches the files.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Over steps: relative difference that counts as noise (default: 0 for the same program, else measured).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bisect(
    first: str,
    second: str,
    over: str,
    metric: str | None,
    steps: int | None,
    seeds: int | None,
    max_runs: int,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Find the config changes between two runs that move a metric, or the first step at which they diverge.

    Over configs, trains configs between those of RUN_A and RUN_B for a few steps each, with several seeds, on the local
    devices. Exits with code 1 if the runs do not differ by more than the variation across seeds.

    Over steps, searches the records and checkpoints of both runs, and runs the steps between again. Runs may be URIs. Exits
    with code 1 if the runs do not differ.
    """
    if over == "steps":
        _refuse("--seeds", seeds, "configs")
        _bisect_steps(first, second, metric, tolerance, max_runs, steps or _MAX_STEPS, as_json)
    else:
        _refuse("--tolerance", tolerance, "steps")
        _bisect_configs(
            Path(first), Path(second), metric or "loss", steps or _STEPS, seeds or _SEEDS, max_runs, as_json
        )


def _refuse(option: str, value: object, over: str) -> None:
    from axlearn_core.errors import RequestError

    if value is not None:
        raise RequestError(
            f"{option} needs --over {over}\n    got: {option} {value}\n    fix: add --over {over}, or remove {option}"
        )


def _bisect_steps(
    first: str, second: str, metric: str | None, tolerance: float | None, max_runs: int, steps: int, as_json: bool
) -> None:
    from axlearn_core.plugins.backends import prepare_backends
    from axlearn_plugins_tools.reporting import step_bisect as search
    from axlearn_plugins_tools.reporting.comparison import open_run
    from axlearn_plugins_tools.reporting.step_bisect_text import to_json, to_text

    prepare_backends()
    result = search.find_step(
        open_run(first),
        open_run(second),
        metric=metric,
        tolerance=tolerance,
        max_reruns=max_runs,
        max_steps=steps,
        progress=lambda line: echo(line, err=True),
    )
    echo(json.dumps(to_json(result), indent=2) if as_json else to_text(result))
    if not result.differs:
        raise SystemExit(1)


def _bisect_configs(
    first: Path, second: Path, metric: str, steps: int, seeds: int, max_runs: int, as_json: bool
) -> None:
    from axlearn_core.cli.common import to_json_value
    from axlearn_core.errors import RequestError
    from axlearn_plugins_tools.reporting import bisect as search

    for path in (first, second):
        search.run_exists(path)
    old, new = search.read_runs(first, second)
    if max_runs < 2 * seeds:
        raise RequestError(
            f"--max-runs is too small to train both runs\n    got: {max_runs}\n    expected: at least {2 * seeds}"
        )
    search.check_metric(old, metric, steps)
    trainings = search.Trainings(metric, steps, range(seeds), max_runs)
    result = search.bisect(old, new, metric, trainings.score, progress=lambda line: echo(line, err=True))
    result = search.set_trainings(result, trainings.count)

    def format_value(value: Any) -> str:
        return value if isinstance(value, str) else repr(value)

    echo(
        json.dumps(to_json_value(search.as_json(result, format_value)), indent=2)
        if as_json
        else search.text(result, metric, format_value)
    )
    if not result.moving:
        raise SystemExit(1)
