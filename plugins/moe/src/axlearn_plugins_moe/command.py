"""`axlearn upcycle`."""

import shlex
from collections.abc import Sequence

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.argument("run_dir", metavar="RUN_DIR|URI")
@click.argument("new_run_dir")
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="The features; default: moe.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint to take; default: the newest.")
def upcycle(run_dir: str, new_run_dir: str, with_: Sequence[str], set_: Sequence[str], step: int | None) -> None:
    """Make a run with experts, in NEW_RUN_DIR, of the dense model in RUN_DIR.

    Every expert starts as a copy of the feed-forward layer that it replaces. The new run begins at step 0 with a fresh
    optimizer, and takes the training data from where the old run stopped.
    """
    from axlearn_plugins_finetune.conversion.convert import converted

    converted(run_dir, new_run_dir, with_=with_ or ("moe",), set=set_, step=step)
    run = shlex.quote(new_run_dir)
    echo(f"to train it: axlearn train {run}/config.yaml --run-dir {run}", err=True)
    echo(str(new_run_dir))
