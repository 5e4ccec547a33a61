"""`axlearn quantize`: a trained run with its weights stored as integers."""

from typing import Any

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("out")
@click.option("--storage", type=click.Choice(["int8", "int4"]), default="int8", show_default=True, help="The integers.")
@click.option(
    "--tile-size", type=click.IntRange(min=1), metavar="N", help="So many inputs share a scale; default: all."
)
@click.option("--target", default="model.**", show_default=True, metavar="PATTERN", help="Which linear maps.")
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint to take; default: the newest.")
def quantize(run_dir: str, out: str, storage: Any, tile_size: int | None, target: str, step: int | None) -> None:
    """Write the run OUT: the model of RUN_DIR with the weights of its linear maps stored as integers.

    OUT generates as RUN_DIR does, and cannot be trained. Its path goes to standard output, the sizes to standard error.
    """
    from axlearn_plugins_quantization.store import quantize_run

    before, after = quantize_run(run_dir, out, storage=storage, tile_size=tile_size, target=target, step=step)
    echo(f"parameters: {before:,} bytes, now {after:,} ({after / before:.0%})", err=True)
    echo(out)
