"""`axlearn plan --serve`."""

import json
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.cli.common import no_devices, plain
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.settings import PREFIX, engine_config


def plan_serving(_flag: bool, request: Any, function: str, as_json: bool, export: str | None) -> None:
    """Plans a server of an experiment, a run or a model in Hugging Face format; exit code 1 where it does not fit.

    Args:
        request: its settings under `serving.` are of the engine.
        function: must be the command's default.
        as_json: prints one JSON object.
        export: writes the compiled programs to this directory. Without a target they are for the devices that are here,
            and no plan is made.

    Raises:
        RequestError: the model is not a decoder, no machine is named, or options that do not go together.
    """
    if function != "train":
        raise RequestError("--serve and --function cannot be given together\n    fix: leave one of them out")
    engine = [s for s in request.settings if s.path.startswith(PREFIX)]
    config = engine_config(engine)
    request = attrs.evolve(request, settings=tuple(s for s in request.settings if s not in engine))
    if export is not None and request.target is None:
        from axlearn_plugins_serving.plan.exports import export_here

        count, seconds = export_here(request, config, Path(export))
        echo(f"{count} programs in {export}, compiled in {seconds:.1f} s")
        return
    no_devices()
    from axlearn_plugins_plan.command import styled
    from axlearn_plugins_serving.plan import render
    from axlearn_plugins_serving.plan.plan_request import planned

    plan = planned(request, config, None if export is None else Path(export))
    if as_json:
        echo(json.dumps(plain(render.as_json(plan)), indent=2, ensure_ascii=False))
    else:
        for line in render.text(plan).splitlines():
            echo(styled(line))
    if export is not None:
        echo(f"exported to {export}", err=True)
    if not plan.fits:
        raise SystemExit(1)
