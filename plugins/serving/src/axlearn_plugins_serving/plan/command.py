"""`axlearn plan serve`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import attrs
import click

from axlearn_core.cli.common import experiment_argument, no_devices, request_options, to_json_value
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError


@click.command("plan-serve", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--export", metavar="DIR", help="Write programs for `axlearn serve --programs`.")
@click.option("--verbose", is_flag=True, help="Also list the kernels that were not considered.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with bytes per device.")
def plan_serving(request: Any, export: str | None, verbose: bool, as_json: bool) -> None:
    """Plan a server for an experiment, a run, or a model in Hugging Face format.

    `--set serving.PATH=VALUE` sets the engine. --export without --target compiles for the devices of this machine and prints no
    plan. Exit code 1 if the server does not fit.
    """
    require_plan()
    from axlearn_plugins_serving.settings import PREFIX, engine_config

    engine = [s for s in request.settings if s.path.startswith(PREFIX)]
    config = engine_config(engine)
    request = attrs.evolve(request, settings=tuple(s for s in request.settings if s not in engine))
    if export is not None and request.target is None:
        from axlearn_plugins_serving.plan.exports import export_programs

        count, seconds = export_programs(request, config, Path(export))
        echo(f"{count} programs in {export}, compiled in {seconds:.1f} s")
        return
    no_devices()
    from axlearn_plugins_plan.command import style_line
    from axlearn_plugins_serving.plan import render
    from axlearn_plugins_serving.plan.plan_request import plan_server

    plan = plan_server(request, config, None if export is None else Path(export))
    if as_json:
        echo(json.dumps(to_json_value(render.as_json(plan)), indent=2, ensure_ascii=False))
    else:
        for line in render.text(plan, verbose=verbose).splitlines():
            echo(style_line(line))
    if export is not None:
        echo(f"exported to {export}", err=True)
    if not plan.fits:
        raise SystemExit(1)


def require_plan() -> None:
    """Raise `RequestError` if axlearn-plugins-plan is not installed.

    That package analyzes the compiled programs.
    """
    if importlib.util.find_spec("axlearn_plugins_plan") is None:
        raise RequestError(
            "planning a server needs axlearn-plugins-plan\n    fix: pip install 'axlearn-plugins-serving[plan]'"
        )
