"""`axlearn bench` and `axlearn checkpoint`: plugins register their commands as `bench-NAME` and `checkpoint-NAME`."""

import click

from axlearn_core.cli.main import Group


@click.group(cls=Group)
def bench() -> None:
    """Measurements.

    The commands come from plugins: `step` from axlearn-plugins-plan, `serve` from axlearn-plugins-serving.
    """


@click.group(cls=Group)
def checkpoint() -> None:
    """Checkpoints: what a run has saved, and other formats.

    The commands come from plugins: `list` and `inspect` from axlearn-plugins-tools, `import-hf` and `export-hf` from
    axlearn-plugins-models.
    """
