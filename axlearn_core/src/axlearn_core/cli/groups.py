"""The `axlearn bench` and `axlearn checkpoint` groups. Plugins register their commands as `GROUP-NAME`."""

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

    The commands come from plugins: `list` and `inspect` from axlearn-plugins-tools, `import-hf` and `export-hf` from
    axlearn-plugins-models, `import-orbax` and `export-orbax` from axlearn-plugins-orbax.
    """
