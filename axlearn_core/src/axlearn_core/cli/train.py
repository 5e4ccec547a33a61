"""`axlearn train`."""

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
@click.option("--run-dir", metavar="DIR|URI", help="Default: runs/<experiment>-<hash of the config>.")
@click.option("--restore-step", type=click.IntRange(min=1), help="Go back to this checkpoint instead of the newest.")
@click.option("--allow-drift", is_flag=True, help="Continue a run although what it computes changed.")
@click.option("--dry-run", is_flag=True, help="Say what would run, and write nothing.")
@click.option("--restart", is_flag=True, help="Begin at step 0; sets earlier metrics and checkpoints aside.")
def train(
    request: Any, run_dir: str | None, restore_step: int | None, allow_drift: bool, dry_run: bool, restart: bool
) -> None:
    """Train EXPERIMENT, or the experiment of a YAML file.

    Resumes from the newest checkpoint in the run directory. Ctrl-C saves and says how to resume.
    """
    run_training(request, run_dir, allow_drift, dry_run, restore_step, restart)


def run_training(
    request: Any, run_dir: str | None, allow_drift: bool, dry_run: bool, restore_step: int | None, restart: bool
) -> None:
    """What the command does, with the values of its options."""
    places = {"run_dir": run_dir, "allow_drift": allow_drift, "restore_step": restore_step, "restart": restart}
    if dry_run:
        from axlearn_core.train.dry_run import dry_run as describe

        facts = describe(request, **places)
        width = max(len(fact.name) for fact in facts)
        for fact in facts:
            echo(f"{click.style(fact.name.ljust(width), fg='cyan')}  {fact.value}")
        return
    from axlearn_core.run.events import owns_process
    from axlearn_core.train.api import train as run

    owns_process.set()
    result = run(request, **places)
    if result.stop_signal is not None:
        words = [w for w in sys.argv[1:] if w not in ("--allow-drift", "--restart")]
        echo(f"saved step {result.step} in {result.name}\nto go on: axlearn {shlex.join(words)}", err=True)
        sys.exit(128 + result.stop_signal)
    finished = ", ".join(f"{k} {v:.4g}" for k, v in result.metrics.items())
    echo(f"\nfinished {result.step} steps: {finished}", err=True)
    echo("\n  ".join(["try next:", *suggestions(request.experiment, result.name)]), err=True)
    echo(result.name)


def suggestions(experiment: str, run_dir: Any) -> list[str]:
    """Commands that make sense after this run: to write text only where the model can."""
    from axlearn_core.config.flat import flatten
    from axlearn_core.contracts.capabilities import GeneratesTokens
    from axlearn_core.contracts.experiment import model_of
    from axlearn_core.run import Run

    config: Any = Run(run_dir).config
    layers = [f"{path.partition('.layer.')[0]}.layer" for path in flatten(config) if ".layer." in path]
    model = model_of(config)
    writes = model is not None and isinstance(model.owner, type) and issubclass(model.owner, GeneratesTokens)
    run = shlex.quote(str(run_dir))
    return [
        *([f"axlearn generate {run} --prompt 'def '"] if writes else []),
        f"axlearn report {run}",
        f"axlearn config explain {shlex.quote(str(experiment))} {[*layers, 'model'][0]}",
    ]
