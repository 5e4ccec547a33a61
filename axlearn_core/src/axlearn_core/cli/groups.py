"""The groups `axlearn bench` and `axlearn checkpoint`. Plugins register their commands as `GROUP-NAME`."""

import click

from axlearn_core.cli.main import Group


@click.group(cls=Group)
def bench() -> None:
    """Measure training steps, or a running server.

    Plugins add the commands: axlearn-plugins-plan adds `step`, and axlearn-plugins-serving adds `serve`.
    """


@click.group(cls=Group)
def checkpoint() -> None:
    """List, inspect and convert checkpoints.

    Plugins add the commands: axlearn-plugins-tools adds `list` and `inspect`, and axlearn-plugins-models adds `import-hf` and
    `export-hf`.
    """
