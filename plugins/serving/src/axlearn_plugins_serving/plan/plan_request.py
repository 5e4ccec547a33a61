"""Plan the server that a request describes."""

from pathlib import Path
from typing import Any

import attrs

from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import open_weights
from axlearn_plugins_plan.plan import require_machine
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import remove_kernels
from axlearn_plugins_serving.plan.serving_plan import ServingPlan, cast_to_compute_dtype, plan_model


def plan_server(request: Request, config: ServingEngine.Config, export: Path | None = None) -> ServingPlan:
    """Plan the server that a request describes.

    Args:
        request: Request to plan. Its experiment may be a run directory or a directory in Hugging Face format.
        config: Config of the engine.
        export: Directory for the compiled programs. If it is None, no programs are written.

    Raises:
        RequestError: If no machine is named, no installed compiler supports it, or the model does not generate tokens.
        ConfigError: If the model cannot be split over this number of devices.
    """
    from axlearn_core.train import Trainer

    opened = open_directory(request)
    resolved = resolve(opened or request)
    machine = require_machine(resolved)
    root = resolved.config
    if not isinstance(root, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(root).__qualname__}; expected a Trainer.Config")
    model, notes = remove_kernels(root.model), resolved.notes
    if opened is None:
        model, more = cast_to_compute_dtype(model)
        notes = (*notes, *more)
    levels = (request.settings, request.file_settings, *request.base_settings)
    has_mesh_settings = any(setting.path.startswith("mesh.") for level in levels for setting in level)
    configure_devices(machine)
    return plan_model(
        model, machine, title=resolved.title, config=config, mesh=root.mesh if has_mesh_settings else None, notes=notes,
        export=export,
    )  # fmt: skip


def open_directory(request: Request) -> Request | None:
    """Return the request with the config of the model in its directory.

    Returns None if the request does not name a directory.
    """
    name = request.experiment
    if isinstance(name, Node) or not Path(name).is_dir():
        return None
    weights: Any = open_weights(name)
    title = request.title or Path(name).resolve().name
    return attrs.evolve(request, experiment=weights.experiment, title=title)
