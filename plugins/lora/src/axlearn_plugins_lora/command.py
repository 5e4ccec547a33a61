"""`axlearn lora`: adapters of a run, merged or on their own."""

from pathlib import Path

import click

_path = click.Path(path_type=Path)
_step = click.option("--step", type=click.IntRange(min=0), help="The checkpoint to take; default: the newest.")


@click.group()
def lora() -> None:
    """Low-rank adapters: merge them into the weights, or export them."""


@lora.command()
@click.argument("run_dir", type=_path)
@click.argument("out", type=_path)
@click.option("--adapters", type=_path, metavar="DIR", help="Exported adapters; RUN_DIR is then the run of their base.")
@_step
def merge(run_dir: Path, out: Path, adapters: Path | None, step: int | None) -> None:
    """Write the run OUT: the model of RUN_DIR with its adapters merged into its weights.

    OUT is a run like any other: it generates, and can be trained on. Its path goes to standard output.
    """
    from axlearn_plugins_lora.runs import merge_run

    merge_run(run_dir, out, exported=adapters, step=step)
    click.echo(out)


@lora.command()
@click.argument("run_dir", type=_path)
@click.argument("directory", metavar="DIR", type=_path)
@_step
def export(run_dir: Path, directory: Path, step: int | None) -> None:
    """Write the adapters of RUN_DIR, without their base, to DIR.

    `--with lora:adapters=DIR` and `axlearn lora merge BASE OUT --adapters DIR` take them. The path goes to standard output.
    """
    from axlearn_plugins_lora.runs import export_run

    export_run(run_dir, directory, step=step)
    click.echo(directory)
