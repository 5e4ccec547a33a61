"""`axlearn config bisect`."""

import json
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("first", metavar="RUN_A", type=click.Path(path_type=Path))
@click.argument("second", metavar="RUN_B", type=click.Path(path_type=Path))
@click.option("--metric", default="loss", show_default=True, help="Name of a scalar of each step.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps per training run.")
@click.option("--seeds", type=click.IntRange(min=2), default=3, show_default=True, help="Number of seeds per config.")
@click.option(
    "--max-runs",
    "--most",
    "max_runs",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Maximum number of training runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bisect(first: Path, second: Path, metric: str, steps: int, seeds: int, max_runs: int, as_json: bool) -> None:
    """Find the changes between two runs that move a metric.

    Trains configs between those of RUN_A and RUN_B for a few steps each, with several seeds, on the local devices.
    Exits with code 1 if the runs do not differ by more than their seeds.
    """
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
