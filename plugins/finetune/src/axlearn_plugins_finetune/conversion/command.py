"""`axlearn convert`."""

from collections.abc import Sequence

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("new_run_dir")
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="Add a feature to the new run.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
@click.option("--step", type=click.IntRange(min=1), help="Checkpoint step (default: newest).")
def convert(run_dir: str, new_run_dir: str, with_: Sequence[str], set_: Sequence[str], step: int | None) -> None:
    """Convert RUN_DIR to a new run with other features.

    Copies the parameters that both models have. The features' bridges compute all other parameters. NEW_RUN_DIR starts at step 0
    with a new optimizer state, and continues the training data of RUN_DIR.
    """
    from axlearn_core.cli.next_steps import after_import, print_next_steps
    from axlearn_plugins_finetune.conversion.convert import convert_run

    convert_run(run_dir, new_run_dir, with_=with_, set=set_, step=step)
    print_next_steps(after_import(new_run_dir))
    echo(str(new_run_dir))
