"""`axlearn train`."""

import shlex
import sys
from pathlib import Path

import click


@click.command()
@click.argument("experiment", metavar="EXPERIMENT|FILE.yaml")
@click.option(
    "--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="Adds a feature; can be repeated."
)
@click.option("--without", multiple=True, metavar="FEATURE", help="Leaves a feature of the file out; can be repeated.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Sets a value; can be repeated.")
@click.option("--target", metavar="NAME", help="Hardware to run on: `cpu`, or `cpu-8` for eight virtual devices.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<experiment>-<hash of the config>.")
@click.option("--steps", type=click.IntRange(min=1), help="The same as --set max_steps=N.")
@click.option(
    "--restore-step", type=click.IntRange(min=1), help="Goes back to this checkpoint; newer ones are removed."
)
@click.option("--allow-drift", is_flag=True, help="Continues a run although its architecture or data changed.")
def train(
    experiment: str,
    with_: tuple[str, ...],
    without: tuple[str, ...],
    set_: tuple[str, ...],
    target: str | None,
    run_dir: Path | None,
    steps: int | None,
    restore_step: int | None,
    allow_drift: bool,
) -> None:
    """Trains EXPERIMENT, or the experiment that a YAML file describes.

    Continues by itself where the run directory has a checkpoint. Ctrl-C saves and says how to go on.
    """
    from axlearn_core.cli.target import use_target

    use_target(target)
    from axlearn_core.plugins.request import Request
    from axlearn_core.train.api import train as run

    request = Request.of(experiment, with_=with_, without=without, set=set_, steps=steps, target=target)
    result = run(request, run_dir=run_dir, allow_drift=allow_drift, restore_step=restore_step)
    if result.stop_signal is not None:
        words = [w for w in sys.argv[1:] if w != "--allow-drift"]
        click.echo(f"saved step {result.step} in {result.run_dir}\nto go on: axlearn {shlex.join(words)}", err=True)
        sys.exit(128 + result.stop_signal)
    finished = ", ".join(f"{k} {v:.4g}" for k, v in result.metrics.items())
    click.echo(f"\nfinished {result.step} steps: {finished}", err=True)
    click.echo(
        "try next:\n"
        f"  axlearn generate {result.run_dir} --prompt 'def '\n"
        f"  axlearn report {result.run_dir}\n"
        f"  axlearn config explain {experiment} model.decoder.layer",
        err=True,
    )
    click.echo(str(result.run_dir))
