"""The `axlearn train` command."""

import shlex
import sys
from typing import Any

import click

from axlearn_core.cli.common import experiment_argument, request_options
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo


@click.command(cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option(
    "--run-dir", metavar="DIR|URI", help="Run directory (default: runs/<experiment>-<hash of the computation>)."
)
@click.option(
    "--restore-step",
    metavar="N",
    type=click.IntRange(min=1),
    help="Step of the checkpoint to restore (default: the newest).",
)
@click.option("--allow-drift", is_flag=True, help="Resume even if the computation or the data changed.")
@click.option("--dry-run", is_flag=True, help="Print what would run, without writing files.")
@click.option("--restart", is_flag=True, help="Start at step 0; renames earlier metrics and checkpoints.")
def train(
    request: Any, run_dir: str | None, restore_step: int | None, allow_drift: bool, dry_run: bool, restart: bool
) -> None:
    """Train an experiment, or resume its run.

    Resumes from the newest checkpoint in the run directory. With axlearn-plugins-runtime, Ctrl-C saves a
    checkpoint and prints the command to resume.
    """
    run_training(request, run_dir, allow_drift, dry_run, restore_step, restart)


def run_training(
    request: Any, run_dir: str | None, allow_drift: bool, dry_run: bool, restore_step: int | None, restart: bool
) -> None:
    """Run the command with its option values."""
    arguments = {"run_dir": run_dir, "allow_drift": allow_drift, "restore_step": restore_step, "restart": restart}
    if dry_run:
        from axlearn_core.train.dry_run import dry_run as describe

        facts = describe(request, **arguments)
        width = max(len(fact.name) for fact in facts)
        for fact in facts:
            echo(f"{click.style(fact.name.ljust(width), fg='cyan')}  {fact.value}")
        return
    from axlearn_core.run.events import owns_process
    from axlearn_core.train.api import train as run

    owns_process.set()
    try:
        result = run(request, **arguments)
    finally:
        owns_process.clear()  # the process may continue, as in a notebook that calls the command
    if result.stop_signal is not None:
        words = [w for w in sys.argv[1:] if w not in ("--allow-drift", "--restart")]
        echo(f"saved step {result.step} in {result.name}\nto resume: axlearn {shlex.join(words)}", err=True)
        sys.exit(128 + result.stop_signal)
    finished = ", ".join(f"{k} {v:.4g}" for k, v in result.metrics.items())
    from axlearn_core.cli.next_steps import after_training, print_next_steps
    from axlearn_core.errors import counted

    echo(f"\nfinished {counted(result.step, 'step')}: {finished}", err=True)
    print_next_steps(after_training(result.name, request))
    echo(result.name)
