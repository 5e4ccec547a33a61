"""Export programs for this machine's devices, for use with `axlearn serve --programs`."""

import time
from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import serving_program, set_up_devices
from axlearn_plugins_serving.open_engine import check_decoder, fit_config, remove_kernels
from axlearn_plugins_serving.plan.plan_request import open_directory
from axlearn_plugins_serving.programs import check_absent
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_serving.runner_program import RunnerProgram


def export_programs(request: Request, config: ServingEngine.Config, directory: Path) -> tuple[int, float]:
    """Compile and write the programs of a server for this machine's devices.

    This does not need the weights.

    Args:
        request: Request that names a run directory or a directory in Hugging Face format.
        config: Config of the engine. The server must use the same one.
        directory: Directory to create; it must not exist.

    Returns:
        The number of programs and the time in seconds.

    Raises:
        RequestError: If the request does not name a model directory, the model does not generate tokens, or `directory` exists.
    """
    check_absent(directory)
    opened = open_directory(request)
    if opened is None:
        raise RequestError(
            f"{request.experiment!r} is not a model directory, which programs for this machine's devices need\n"
            "    fix: name a run or a directory in Hugging Face format, or the hardware with --target"
        )
    if request.settings or request.features or request.without:
        raise RequestError(
            "the config of an existing model cannot be changed\n    got: --set of its config, --with or --without\n"
            "    fix: remove them; --set serving.PATH=VALUE is for the engine"
        )
    started = time.perf_counter()
    set_up_devices(config, owns_cores=True)
    experiment: Any = opened.experiment
    model = remove_kernels(experiment.model)
    check_decoder(model)
    runner = fit_config(config, model).runner
    if not isinstance(runner, ModelRunner.Config):
        raise RequestError(f"a {type(runner).__qualname__} cannot be exported\n    expected: model-runner")
    layout = serving_program(model, experiment.mesh, config)
    devices = list(layout.layout.mesh.devices.flat)
    program = RunnerProgram.with_steps(runner, model, devices, layout.mesh, layout.target)
    program.export_all(directory)
    return len(program.compiled), time.perf_counter() - started
