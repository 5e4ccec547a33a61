"""The devices of an engine, and the number of devices that split each matrix multiplication."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core import compat
from axlearn_core.compose import Functional
from axlearn_core.compose.devices import configure_devices
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError, Problem, RequestError
from axlearn_core.run.notices import log_message
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.paged_cache_feature import has_latents
from axlearn_plugins_serving.parity import find_parity_problem
from axlearn_plugins_serving.runner import ModelRunner

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
VIRTUAL_DEVICES = 2
"""Number of virtual CPU devices that split each matrix multiplication by default. Operations for which XLA
uses one thread per device then use two. This was measured on a machine with two cores."""


def set_up_devices(config: ServingEngine.Config, *, owns_cores: bool = False) -> None:
    """Create the virtual CPU devices of a serving process.

    Call it before JAX starts. Has no effect if there are accelerators.

    Args:
        config: Config of the engine.
        owns_cores: Whether this engine has the machine's cores to itself, or loads programs exported for such an engine.
            By default, two devices then split each matrix multiplication.
    """
    configure_devices(None)
    shares = owns_cores and _may_share(config) and _count_cores() >= VIRTUAL_DEVICES
    count = config.tensor_parallel or (VIRTUAL_DEVICES if shares else 1)
    if count > 1:
        runner = config.runner
        if isinstance(runner, ModelRunner.Config) and runner.decode_steps > 1:
            compat.set_thread_count(count)  # in a loop with collectives, each device occupies a thread
        _create_virtual_devices(count)


def serving_program(model: Node[Any], mesh: Mesh, config: ServingEngine.Config) -> ModelProgram:
    """Build an engine's program, in which `tensor_parallel` devices split each matrix multiplication.

    Args:
        model: Config of a `CausalLM`.
        mesh: Mesh of the experiment. Its shape is ignored, because it was chosen for training.
        config: Config of the engine.

    Raises:
        RequestError: If there are not enough devices.
        ConfigError: If the number of heads or the width is not divisible by the number of devices.
    """
    functional, devices = Functional.from_config(model), jax.devices()

    def program(count: int) -> ModelProgram:
        shape = {"tensor": count} if count > 1 else {}
        try:
            return ModelProgram(functional, devices[:count], attrs.evolve(mesh, shape=shape))
        except ConfigError as error:
            raise ConfigError(_division_problem(error, count)) from error

    if config.tensor_parallel is not None:
        _check_count(config.tensor_parallel, devices)
        return program(config.tensor_parallel)
    can_share = devices[0].platform == "cpu" and len(devices) >= VIRTUAL_DEVICES and not has_latents(model)
    if can_share and _may_share(config):
        with contextlib.suppress(ConfigError):  # the model's sizes may not be divisible by the device count
            shared = program(VIRTUAL_DEVICES)
            parity = isinstance(config.runner, ModelRunner.Config) and config.runner.mode == "parity"
            if not parity or find_parity_problem(shared) is None:
                log_message(
                    f"note: {VIRTUAL_DEVICES} virtual CPU devices split each matrix multiplication; "
                    "serving.tensor_parallel=1 uses one"
                )
                return shared
    return program(1)


def _create_virtual_devices(count: int) -> None:
    """Create virtual devices unless the user has set their number or JAX has started."""
    settings: Any = jax.config
    if "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or settings.jax_num_cpu_devices > 0:
        return
    with contextlib.suppress(RuntimeError):  # JAX has started
        settings.update("jax_num_cpu_devices", count)


def _may_share(config: ServingEngine.Config) -> bool:
    """Return True if virtual CPU devices may split matrix multiplications by default.

    Decoding several tokens per dispatch needs a loop with collectives, which XLA for CPU may never finish if it has few
    threads.
    """
    return isinstance(config.runner, ModelRunner.Config) and config.runner.decode_steps == 1


def _count_cores() -> float:
    """Return the number of cores that CPU affinity and the container's quota allow."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no quota: "max"
        return cores


def _division_problem(error: ConfigError, count: int) -> Problem:
    return Problem(
        path="serving.tensor_parallel",
        message=f"{count} devices cannot split the matrix multiplications of this model",
        got=str(error).replace("\n", " ").partition(" fix:")[0].strip(),
        fix="use a divisor of the size of that dimension, or 1",
    )


def _check_count(count: int, devices: list[Any]) -> None:
    if count > len(devices):
        raise RequestError(
            f"serving.tensor_parallel={count} needs {count} devices\n"
            f"    got: {len(devices)} x {devices[0].device_kind}\n"
            "    fix: lower it. In Python, create a CPU's virtual devices before JAX starts: "
            f'jax.config.update("jax_num_cpu_devices", {count}); XLA_FLAGS and JAX_NUM_CPU_DEVICES may set a different number'
        )
