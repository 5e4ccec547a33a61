"""`axlearn kernels`."""

from typing import Any

import click

from axlearn_core.cli.common import json_option, no_devices, print_json, request_options
from axlearn_core.cli.terminal import echo


@click.group()
def kernels() -> None:
    """Show which kernel each op gets, and why."""


@kernels.command()
@click.argument("experiment", metavar="EXPERIMENT")
@request_options
@click.option("--function", "name", default="train", show_default=True, help="Or evaluate, score, prefill, decode, ...")
@json_option
def explain(request: Any, name: str, as_json: bool) -> None:
    """Print, for each call of an op in a training step, which implementation was chosen and why the others were not.

    The step is traced for the machine that --target names, and not compiled. --function takes another function of the
    experiment: generation of one row as long as those of training, for instance.
    """
    no_devices()
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_plan.plan import prepared
    from axlearn_plugins_plan.render import kernel_lines, kernels_json

    program, batch = prepared(resolve(request))
    program.trace(name, program.function(name).bucket_of(batch))
    choices = program.choices(name)
    if as_json:
        print_json(kernels_json(choices))
        return
    for line in kernel_lines(choices):
        echo(line if line.startswith(" ") else click.style(line, bold=True))
    if not choices:
        echo(f"nothing in {name} calls an op that has implementations", err=True)
