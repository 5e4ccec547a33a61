"""`axlearn convert`."""

import shlex
from collections.abc import Sequence

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("new_run_dir")
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="What the new run has more.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint to take; default: the newest.")
def convert(run_dir: str, new_run_dir: str, with_: Sequence[str], set_: Sequence[str], step: int | None) -> None:
    """Make a run with other features in NEW_RUN_DIR, from the model of RUN_DIR.

    RUN_DIR may be the URI of a run in a storage. The new run takes over all parameters that both models have; the others come
    from the bridges of the features. The new run begins at step 0
    with a fresh optimizer, and takes the training data from where the old run stopped.
    """
    from axlearn_plugins_finetune.conversion.convert import converted

    converted(run_dir, new_run_dir, with_=with_, set=set_, step=step)
    run = shlex.quote(new_run_dir)
    echo(f"to train it: axlearn train {run}/config.yaml --run-dir {run}", err=True)
    echo(str(new_run_dir))
