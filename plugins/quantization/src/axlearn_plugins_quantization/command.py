"""`axlearn quantize`: store the weights of a trained run as integers."""

from typing import Any

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("out")
@click.option(
    "--storage", type=click.Choice(["int8", "int4"]), default="int8", show_default=True, help="Storage dtype."
)
@click.option("--tile-size", type=click.IntRange(min=1), metavar="N", help="Inputs per scale (default: all).")
@click.option("--target", default="model.**", show_default=True, metavar="PATTERN", help="Linear maps to quantize.")
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint step (default: newest).")
def quantize(run_dir: str, out: str, storage: Any, tile_size: int | None, target: str, step: int | None) -> None:
    """Write a copy of RUN_DIR with integer linear weights.

    The new run OUT can generate text but cannot be trained. Prints OUT, and the parameter sizes to
    standard error.
    """
    from axlearn_plugins_quantization.store import quantize_run

    before, after = quantize_run(run_dir, out, storage=storage, tile_size=tile_size, target=target, step=step)
    echo(f"parameters: {before:,} bytes before, {after:,} after ({after / before:.0%})", err=True)
    echo(out)
