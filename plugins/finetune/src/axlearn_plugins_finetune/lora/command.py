"""`axlearn lora`: adapters of a run, merged or on their own."""

from pathlib import Path

import click

from axlearn_core.cli.terminal import echo

_run = click.argument("run_dir", metavar="RUN_DIR|URI")
_step = click.option("--step", type=click.IntRange(min=0), help="The checkpoint to take; default: the newest.")


@click.group()
def lora() -> None:
    """Low-rank adapters: merge them into the weights, or export them."""


@lora.command()
@_run
@click.argument("out")
@click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Exported adapters; RUN_DIR is then the run of their base.",
)
@_step
def merge(run_dir: str, out: str, adapters: Path | None, step: int | None) -> None:
    """Write the run OUT: the model of RUN_DIR with its adapters merged into its weights.

    OUT is a run like any other: it generates, and can be trained on. Its path goes to standard output.
    """
    from axlearn_plugins_finetune.lora.merge import merge_run

    merge_run(run_dir, out, exported=adapters, step=step)
    echo(out)


@lora.command()
@_run
@click.argument("directory", metavar="DIR")
@click.option("--format", "format_", type=click.Choice(["axlearn", "peft"]), default="axlearn", show_default=True)
@click.option("--base", metavar="NAME", help="With --format peft: what the files name as the base model.")
@_step
def export(run_dir: str, directory: str, format_: str, base: str | None, step: int | None) -> None:
    """Write the adapters of RUN_DIR, without their base, to DIR.

    `--with lora:adapters=DIR` and `axlearn lora merge BASE OUT --adapters DIR` take them; with `--format peft`, the library
    PEFT does, beside the base in Hugging Face format. The path goes to standard output.
    """
    if base is not None and format_ != "peft":
        raise click.UsageError("--base goes with --format peft")
    if format_ == "peft":
        from axlearn_plugins_finetune.lora.adapter_format import adapter_format

        adapter_format(format_).export(run_dir, directory, base=base, step=step)
    else:
        from axlearn_plugins_finetune.lora.merge import export_run

        export_run(run_dir, directory, step=step)
    echo(directory)
