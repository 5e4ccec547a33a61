"""`axlearn launch`."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from axlearn_core.cli.common import REQUEST_OPTIONS, experiment_argument, no_devices
from axlearn_core.compat import assign_environment


def _request(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(REQUEST_OPTIONS):
        function = option(function)
    return function


@click.command()
@experiment_argument
@click.option("--on", "launcher", required=True, metavar="LAUNCHER", help="Launcher: local, ray, slurm, ...")
@click.option("--hosts", type=click.IntRange(min=1), metavar="N", help="Hosts that train (default: the target's).")
@click.option("--spares", type=click.IntRange(min=0), default=0, metavar="N", help="Spare hosts (default: 0).")
@click.option(
    "--processes-per-host", type=click.IntRange(min=1), default=1, metavar="N", help="Processes per host (default: 1)."
)
@click.option("--run-dir", metavar="DIR|URI", help="Run directory, reachable from all hosts.")
@click.option("--name", metavar="NAME", help="Job name (default: from the run directory).")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set a variable for every trainer.")
@click.option("--option", "option", multiple=True, metavar="NAME=VALUE", help="Set a launcher option.")
@_request
@click.option("--allow-drift", is_flag=True, help="Resume even if the run's config or data changed.")
@click.option("--dry-run", is_flag=True, help="Print the commands without starting anything.")
def launch(
    experiment: str,
    launcher: str,
    hosts: int | None,
    spares: int,
    processes_per_host: int,
    run_dir: str | None,
    name: str | None,
    env: Sequence[str],
    option: Sequence[str],
    dry_run: bool,
    **train: Any,
) -> None:
    """Train an experiment or a run file on several hosts.

    Under Ray the run is supervised: a failed process is replaced, and training
    resumes from the newest checkpoint. Other launchers submit to a scheduler.
    """
    original_environment = dict(os.environ)
    no_devices()
    from axlearn_core.plugins.registry import registry
    from axlearn_plugins_runtime.launch.check import make_job
    from axlearn_plugins_runtime.launch.job import parse_options

    instance: Any = registry().entry("launchers", launcher).load()()
    kind = _options_class(instance)
    options = parse_options(kind, pairs("--option", option), launcher)
    job = make_job(
        experiment,
        train,
        run_dir=run_dir,
        name=name,
        hosts=hosts,
        spares=spares,
        processes_per_host=processes_per_host,
        environment=pairs("--env", env),
        options=options,
    )
    if not dry_run:
        instance.check()
    assign_environment(original_environment, only=True)  # child processes inherit it, and may run on other machines
    sys.exit(instance.launch(job, dry_run=dry_run))


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse the `NAME=VALUE` values of a repeated option. Raise `RequestError` if one is invalid or a name is repeated."""
    from axlearn_core.errors import RequestError

    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            raise RequestError(f"{option} {text}: expected NAME=VALUE")
        if name in values:
            raise RequestError(f"{option} {name} is given twice: {values[name]!r} and {value!r}")
        values[name] = value
    return values


def _options_class(launcher: object) -> type:
    from axlearn_plugins_runtime.launch.job import HasOptions, NoOptions

    return launcher.Options if isinstance(launcher, HasOptions) else NoOptions
