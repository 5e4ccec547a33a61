"""`axlearn kernels`."""

from typing import Any

import click

from axlearn_core.cli.common import json_option, no_devices, print_json, request_options
from axlearn_core.cli.terminal import echo


@click.group()
def kernels() -> None:
    """Show which kernel each op call uses, and why."""


@kernels.command()
@click.argument("experiment", metavar="EXPERIMENT")
@request_options
@click.option("--function", "name", metavar="NAME", default="train", show_default=True, help="Function to trace.")
@json_option
def explain(request: Any, name: str, as_json: bool) -> None:
    """Print the chosen kernel of each op call, and the reasons.

    Traces a training step for the --target machine without compiling it. --function
    traces another function: evaluate, score, prefill, or decode with a cache as long
    as a training row.
    """
    no_devices()
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_plan.plan import compose_program
    from axlearn_plugins_plan.render import kernel_lines, kernels_json

    program, batch = compose_program(resolve(request))
    program.trace(name, program.function(name).get_bucket(batch))
    choices = program.choices(name)
    if as_json:
        print_json(kernels_json(choices))
        return
    for line in kernel_lines(choices):
        echo(line if line.startswith(" ") else click.style(line, bold=True))
    if not choices:
        echo(f"{name} does not call any op that has kernels", err=True)
