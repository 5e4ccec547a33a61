"""`axlearn bench`: its commands are those that plugins register as `bench-NAME`."""

import click

from axlearn_core.cli.main import Group


@click.group(cls=Group)
def bench() -> None:
    """Measurements.

    The commands come from plugins: `step` from axlearn-plugins-plan, `serve` from axlearn-plugins-serving.
    """
