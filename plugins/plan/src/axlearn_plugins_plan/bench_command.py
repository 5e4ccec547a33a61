"""The command line of `axlearn bench step`."""

import json
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import request_options, to_json_value
from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("experiment", metavar="EXPERIMENT|FILE.yaml")
@request_options
@click.option("--measure", type=click.IntRange(min=1), default=20, show_default=True, help="Steps to measure.")
@click.option("--warmup", type=click.IntRange(min=1), default=3, show_default=True, help="Warm-up steps.")
@click.option("--trace", metavar="DIR", help="Trace five more steps, keep the slowest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def step(request: Any, measure: int, warmup: int, trace: str | None, as_json: bool) -> None:
    """Measure training steps of EXPERIMENT on the local devices.

    Prints the step time, tokens/s, model FLOPs utilization, and the used and planned
    memory. Runs the program of `axlearn train` on batches of the experiment's input.
    Saves nothing.
    """
    from axlearn_core.compose.devices import resolve_for_devices
    from axlearn_core.errors import RequestError
    from axlearn_plugins_plan import bench

    directory = Path(trace) if trace else None
    if directory is not None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RequestError(f"--trace: {directory} exists and is not an empty directory\n    fix: name a new directory")
    resolved = resolve_for_devices(request)
    measured = bench.measure_step(
        resolved, steps=measure, warmup=warmup, trace=directory, progress=lambda line: echo(line, err=True)
    )
    import jax

    if jax.process_index() == 0:
        output = json.dumps(to_json_value(bench.as_json(measured)), indent=2) if as_json else bench.text(measured)
        echo(output)
