"""`axlearn plan`."""

import json
from typing import Any

import click

from axlearn_core.cli.common import experiment_argument, no_devices, plain, request_options
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo


@click.command("plan", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--function", default="train", show_default=True, help="Or evaluate, score, prefill, decode, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; bytes are of one chip.")
def plan(request: Any, function: str, as_json: bool) -> None:
    """Print the memory, time and traffic of a training step on any hardware.

    Exit code 1 if it does not fit. The step is the very program that `axlearn train` runs, compiled for the machine that --target
    names. --function plans another function of the experiment: `decode` of one token, for instance, with a cache as long as the
    rows of training.

    A command below may also be written as a flag: `axlearn plan EXPERIMENT --search`.
    """
    no_devices()
    from axlearn_core.plugins.registry import registry
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_plan import render
    from axlearn_plugins_plan.plan import make_plan
    from axlearn_plugins_plan.remedies import remedies

    result = make_plan(resolve(request), function)
    fixes = remedies(result, frozenset(registry().claims["features"]))
    if as_json:
        echo(json.dumps(plain(render.as_json(result, fixes)), indent=2, ensure_ascii=False))
    else:
        for line in render.text(result, fixes).splitlines():
            echo(styled(line))
    if not result.memory.fits:
        raise SystemExit(1)


def styled(line: str) -> str:
    """A line of a plan in colour."""
    if line.startswith("  fits:"):
        return click.style(line, fg="green")
    if line.startswith("  does not fit:"):
        return click.style(line, fg="red", bold=True)
    return click.style(line, bold=True) if line and not line.startswith(" ") else line
