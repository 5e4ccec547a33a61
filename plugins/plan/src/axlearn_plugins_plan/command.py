"""`axlearn plan`."""

import json
from typing import Any

import click

from axlearn_core.cli.common import experiment_argument, no_devices, request_options, to_json_value
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo


@click.command("plan", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--function", metavar="NAME", default="train", show_default=True, help="Function to plan.")
@click.option(
    "--largest-batch/--no-largest-batch",
    default=None,
    help="Search for the largest batch that fits, with up to 6 more compilations (default: only if the step does not fit).",
)
@click.option("--verbose", is_flag=True, help="Also list the kernels that were not considered.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with bytes per chip.")
def plan(request: Any, function: str, largest_batch: bool | None, verbose: bool, as_json: bool) -> None:
    """Predict the memory, time and traffic of a step on any hardware.

    Requires --target. Compiles the program that `axlearn train` would run on that machine. Exits with code 1 if it does not
    fit. With --function, plans evaluate, score, prefill, or decode (with a cache as long as a training row) instead.

    Commands also work as flags: `axlearn plan EXPERIMENT --search`.
    """
    no_devices()
    from axlearn_core.plugins.registry import registry
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_plan import render
    from axlearn_plugins_plan.plan import add_largest_batch, make_plan
    from axlearn_plugins_plan.remedies import remedies

    resolved = resolve(request)
    result = make_plan(resolved, function)
    if largest_batch or (largest_batch is None and not result.memory.fits):
        result = add_largest_batch(result, resolved, lambda line: echo(line, err=True))
    fixes = remedies(result, frozenset(registry().claims["features"]))
    if as_json:
        echo(json.dumps(to_json_value(render.as_json(result, fixes)), indent=2, ensure_ascii=False))
    else:
        for line in render.text(result, fixes, verbose=verbose).splitlines():
            echo(style_line(line))
    if not result.memory.fits:
        raise SystemExit(1)


def style_line(line: str) -> str:
    """Color one line of a plan."""
    if line.startswith("  fits:"):
        return click.style(line, fg="green")
    if line.startswith("  does not fit:"):
        return click.style(line, fg="red", bold=True)
    return click.style(line, bold=True) if line and not line.startswith(" ") else line
