"""`axlearn checkpoint`: its commands are those that plugins register as `checkpoint-NAME`."""

import click

from axlearn_core.cli.main import Group


@click.group(cls=Group)
def checkpoint() -> None:
    """Checkpoints: what a run has saved, and other formats.

    The commands come from plugins: `list` and `inspect` from axlearn-plugins-tools, `import-hf` and `export-hf` from
    axlearn-plugins-models.
    """
