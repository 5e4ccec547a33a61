"""The `axlearn upcycle` command."""

from collections.abc import Sequence

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("new_run_dir")
@click.option(
    "--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="Features to apply (default: moe)."
)
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
@click.option("--step", type=click.IntRange(min=1), help="Step of the checkpoint (default: newest).")
def upcycle(run_dir: str, new_run_dir: str, with_: Sequence[str], set_: Sequence[str], step: int | None) -> None:
    """Convert the dense model in RUN_DIR into a new run with experts.

    Every expert starts as a copy of the feed-forward layer that it replaces. The new run, in NEW_RUN_DIR, begins at
    step 0 with a fresh optimizer and resumes the training data at the position where RUN_DIR stopped.
    """
    from axlearn_core.cli.next_steps import after_import, print_next_steps
    from axlearn_plugins_finetune.conversion.convert import convert_run

    convert_run(run_dir, new_run_dir, with_=with_ or ("moe",), set=set_, step=step)
    print_next_steps(after_import(new_run_dir))
    echo(str(new_run_dir))
