"""`axlearn lora`: merge or export the adapters of a run."""

from pathlib import Path

import click

from axlearn_core.cli.terminal import echo

_run = click.argument("run_dir", metavar="RUN_DIR|URI")
_step = click.option("--step", type=click.IntRange(min=0), help="Checkpoint step (default: newest).")


@click.group()
def lora() -> None:
    """Merge or export low-rank adapters."""


@lora.command()
@_run
@click.argument("out")
@click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Exported adapters to merge into RUN_DIR.",
)
@_step
def merge(run_dir: str, out: str, adapters: Path | None, step: int | None) -> None:
    """Merge the adapters of RUN_DIR and write the new run OUT.

    OUT is an ordinary dense run, which can generate and be trained. Prints OUT.
    """
    from axlearn_plugins_finetune.lora.merge import merge_run

    merge_run(run_dir, out, exported=adapters, step=step)
    echo(out)


@lora.command()
@_run
@click.argument("directory", metavar="DIR")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["axlearn", "peft"]),
    default="axlearn",
    show_default=True,
    help="File format.",
)
@click.option("--base", metavar="NAME", help="Name of the base model (for --format peft).")
@_step
def export(run_dir: str, directory: str, format_: str, base: str | None, step: int | None) -> None:
    """Write the adapters of RUN_DIR, without their base, to DIR.

    Use them with `--with lora:adapters=DIR` or `axlearn lora merge BASE OUT --adapters
    DIR`. With --format peft, the library PEFT can load them on the base in Hugging Face
    format. Prints DIR.
    """
    if base is not None and format_ != "peft":
        raise click.UsageError("--base requires --format peft")
    if format_ == "peft":
        from axlearn_plugins_finetune.lora.adapter_format import adapter_format

        adapter_format(format_).export(run_dir, directory, base=base, step=step)
    else:
        from axlearn_plugins_finetune.lora.merge import export_run

        export_run(run_dir, directory, step=step)
    echo(directory)
