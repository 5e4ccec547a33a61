"""The option `axlearn plan --one-line`."""

from typing import Any

import click

from axlearn_core.cli.common import no_devices
from axlearn_core.errors import RequestError


def one_line(_flag: bool, request: Any, function: str, as_json: bool) -> None:
    """Prints title, machine, and whether it fits, for a loop over many experiments. Exit code 1 where it does not fit."""
    if as_json:
        raise RequestError("--one-line and --json cannot be given together\n    fix: leave one of them out")
    no_devices()
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_plan.plan import make_plan

    plan = make_plan(resolve(request), function)
    click.echo(f"{plan.title} {function} on {plan.machine.name}: {'fits' if plan.memory.fits else 'does not fit'}")
    if not plan.memory.fits:
        raise SystemExit(1)
