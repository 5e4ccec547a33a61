"""From a request to the plan of a server on the machine that it names."""

from pathlib import Path
from typing import Any

import attrs

from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import open_weights
from axlearn_plugins_plan.plan import machine_of
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import without_kernels
from axlearn_plugins_serving.plan.serving_plan import ServingPlan, held_in_compute_dtype, plan_model


def planned(request: Request, config: ServingEngine.Config, export: Path | None = None) -> ServingPlan:
    """The plan that a request asks for.

    Args:
        request: its experiment may be a run directory, or one in Hugging Face format.
        config: of the engine.
        export: where the compiled programs go; None writes none.

    Raises:
        RequestError: no machine is named, nothing can compile for it, or the model is not a decoder of tokens.
        ConfigError: the devices do not divide the model.
    """
    from axlearn_core.train import Trainer

    opened = opened_directory(request)
    resolved = resolve(opened or request)
    machine = machine_of(resolved)
    root = resolved.config
    if not isinstance(root, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(root).__qualname__}; expected a Trainer.Config")
    model, notes = without_kernels(root.model), resolved.notes
    if opened is None:
        model, more = held_in_compute_dtype(model)
        notes = (*notes, *more)
    levels = (request.settings, request.file_settings, *request.base_settings)
    own_mesh = any(setting.path.startswith("mesh.") for level in levels for setting in level)
    configure_devices(machine)
    return plan_model(
        model, machine, title=resolved.title, config=config, mesh=root.mesh if own_mesh else None, notes=notes,
        export=export,
    )  # fmt: skip


def opened_directory(request: Request) -> Request | None:
    """The request for the config of the model in a directory; None where it names an experiment or a run file."""
    name = request.experiment
    if isinstance(name, Node) or not Path(name).is_dir():
        return None
    weights: Any = open_weights(name)
    title = request.title or Path(name).resolve().name
    return attrs.evolve(request, experiment=weights.experiment, title=title)
