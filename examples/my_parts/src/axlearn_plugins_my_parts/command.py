"""The `axlearn plan one-line` command."""

from typing import Any

import click

from axlearn_core.extend import ExtensibleCommand, experiment_argument, no_devices, request_options


@click.command("plan-one-line", cls=ExtensibleCommand)
@experiment_argument
@request_options
def one_line(request: Any) -> None:
    """Print the experiment, the machine, and whether a training step fits.

    Use it in a loop over many experiments. Exits with code 1 if the step does not fit.
    """
    no_devices()
    from axlearn_core.extend import resolve
    from axlearn_plugins_plan.plan import make_plan

    plan = make_plan(resolve(request), "train")
    click.echo(f"{plan.title} on {plan.machine.name}: {'fits' if plan.memory.fits else 'does not fit'}")
    if not plan.memory.fits:
        raise SystemExit(1)
