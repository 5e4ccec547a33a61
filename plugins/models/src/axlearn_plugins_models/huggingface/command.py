"""The commands `axlearn checkpoint import-hf` and `export-hf`."""

from collections.abc import Sequence
from pathlib import Path

import click

from axlearn_core.cli.terminal import echo
from axlearn_core.errors import counted


@click.command()
@click.argument("directory", metavar="DIR|ORG/NAME")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="Add a feature.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
def import_hf(directory: str, run_dir: Path, with_: Sequence[str], set_: Sequence[str]) -> None:
    """Import a Hugging Face model as a run in RUN_DIR.

    The model is a directory, or `org/name` or `org/name@revision` on the Hugging Face hub, which is downloaded.
    The run starts at step 0 with these weights and a new optimizer state. Use --set to choose its training data and
    other settings: `--set input.source.paths=[...]`.
    """
    from axlearn_core.cli.next_steps import after_import, print_next_steps
    from axlearn_plugins_models.huggingface.import_export import import_run

    source = import_run(directory, run_dir, with_=with_, set=set_)
    echo(
        f"{source.family.model_type}: {source.model.num_parameters:,} parameters from "
        f"{counted(len(source.stored), 'tensor')}",
        err=True,
    )
    print_next_steps(after_import(str(run_dir)))
    echo(str(run_dir))


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("directory", metavar="DIR")
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint (default: the newest).")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Dtype of the tensors (default: the dtype at import, or else the parameters' dtype).",
)
def export_hf(run_dir: str, directory: str, step: int | None, dtype: str | None) -> None:
    """Export the model of RUN_DIR in Hugging Face format to the new directory DIR."""
    from axlearn_plugins_models.huggingface.import_export import export_run

    export_run(run_dir, directory, step=step, dtype=dtype)
    echo(str(directory))
