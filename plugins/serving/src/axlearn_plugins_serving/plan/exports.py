"""Programs for the devices that are here, as `axlearn serve` loads them."""

import time
from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import serving_program, set_up_devices
from axlearn_plugins_serving.open_engine import check_decoder, fit_config, without_kernels
from axlearn_plugins_serving.plan.plan_request import opened_directory
from axlearn_plugins_serving.programs import check_new
from axlearn_plugins_serving.runner import ModelRunner, RunnerProgram


def export_here(request: Request, config: ServingEngine.Config, directory: Path) -> tuple[int, float]:
    """Compiles the programs of a server for the devices that are here, without its weights, and writes them.

    Args:
        request: names a run directory, or one in Hugging Face format.
        config: of the engine: the server has to have the same.
        directory: must not exist.

    Returns:
        How many programs there are, and the seconds that it took.

    Raises:
        RequestError: no directory of a model, a model that is not a decoder, or a directory that exists.
    """
    check_new(directory)
    opened = opened_directory(request)
    if opened is None:
        raise RequestError(
            f"{request.experiment!r} is not a directory of a model: programs for the devices here are of one\n"
            "    fix: give a run, or a directory in Hugging Face format; or name the hardware with --target"
        )
    if request.settings or request.features or request.without:
        raise RequestError(
            "a model that is there is served as it is\n    got: --set of its config, --with or --without\n"
            "    fix: leave them out; --set serving.PATH=VALUE is for the engine"
        )
    started = time.perf_counter()
    set_up_devices(config, owns_cores=True)
    experiment: Any = opened.experiment
    model = without_kernels(experiment.model)
    check_decoder(model)
    runner = fit_config(config, model).runner
    if not isinstance(runner, ModelRunner.Config):
        raise RequestError(f"a {type(runner).__qualname__} cannot be exported\n    expected: model-runner")
    layout = serving_program(model, experiment.mesh, config)
    devices = list(layout.layout.mesh.devices.flat)
    program = RunnerProgram.with_steps(runner, model, devices, layout.mesh, layout.target)
    program.export_all(directory)
    return len(program.compiled), time.perf_counter() - started
