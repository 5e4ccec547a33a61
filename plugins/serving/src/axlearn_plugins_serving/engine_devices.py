"""The devices that an engine computes on: how many share each product."""

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
from axlearn_plugins_serving.paged import has_latents
from axlearn_plugins_serving.parity import refusal_of_parity
from axlearn_plugins_serving.runner import ModelRunner

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
VIRTUAL_DEVICES = 2
"""Virtual devices of one CPU that share each product by default: what XLA computes in one thread is then computed in two. Measured
on two cores."""


def set_up_devices(config: ServingEngine.Config, *, owns_cores: bool = False) -> None:
    """Gives a process that serves its virtual CPU devices. Call before JAX starts. A machine with accelerators uses none of them.

    Args:
        config: of the engine.
        owns_cores: whether no other engine computes on this machine's cores, or programs are loaded that were exported for one
            that does: two devices share products, if not said otherwise.
    """
    configure_devices(None)
    shares = owns_cores and _may_share(config) and _count_cores() >= VIRTUAL_DEVICES
    count = config.tensor_parallel or (VIRTUAL_DEVICES if shares else 1)
    if count > 1:
        runner = config.runner
        if isinstance(runner, ModelRunner.Config) and runner.decode_steps > 1:
            compat.threads_for(count)  # a loop with collectives, in which each device holds a thread
        _make_virtual(count)


def serving_program(model: Node[Any], mesh: Mesh, config: ServingEngine.Config) -> ModelProgram:
    """The program of an engine: `tensor_parallel` devices share each product.

    Args:
        model: the config of a `CausalLM`.
        mesh: of the experiment; its shape was that of the training.
        config: of the engine.

    Raises:
        RequestError: there are fewer devices.
        ConfigError: the devices do not divide the heads or the width.
    """
    functional, devices = Functional.of(model), jax.devices()

    def program(count: int) -> ModelProgram:
        shape = {"tensor": count} if count > 1 else {}
        try:
            return ModelProgram(functional, devices[:count], attrs.evolve(mesh, shape=shape))
        except ConfigError as error:
            raise ConfigError(_cannot_divide(error, count)) from error

    if config.tensor_parallel is not None:
        _check_count(config.tensor_parallel, devices)
        return program(config.tensor_parallel)
    can_share = devices[0].platform == "cpu" and len(devices) >= VIRTUAL_DEVICES and not has_latents(model)
    if can_share and _may_share(config):
        with contextlib.suppress(ConfigError):  # its sizes cannot be divided
            shared = program(VIRTUAL_DEVICES)
            parity = isinstance(config.runner, ModelRunner.Config) and config.runner.mode == "parity"
            if not parity or refusal_of_parity(shared) is None:
                log_message(
                    f"note: {VIRTUAL_DEVICES} virtual CPU devices share each product; serving.tensor_parallel=1 takes one"
                )
                return shared
    return program(1)


def _make_virtual(count: int) -> None:
    """Where the user has not said how many there are, and JAX has not started."""
    settings: Any = jax.config
    if "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or settings.jax_num_cpu_devices > 0:
        return
    with contextlib.suppress(RuntimeError):  # JAX has started
        settings.update("jax_num_cpu_devices", count)


def _may_share(config: ServingEngine.Config) -> bool:
    """Whether virtual CPU devices share products where nobody says how many do.

    Not with several tokens in one dispatch, a loop that XLA for CPU may not end with few threads.
    """
    return isinstance(config.runner, ModelRunner.Config) and config.runner.decode_steps == 1


def _count_cores() -> float:
    """Those that this process may use, by its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # there is none: "max"
        return cores


def _cannot_divide(error: ConfigError, count: int) -> Problem:
    return Problem(
        path="serving.tensor_parallel",
        message=f"{count} devices cannot share the products of this model",
        got=str(error).replace("\n", " ").partition(" fix:")[0].strip(),
        fix="give a number that divides it, or 1",
    )


def _check_count(count: int, devices: list[Any]) -> None:
    if count > len(devices):
        raise RequestError(
            f"serving.tensor_parallel={count} needs {count} devices\n"
            f"    got: {len(devices)} x {devices[0].device_kind}\n"
            "    fix: ask for as many as there are. In Python, a CPU's virtual devices are made before JAX starts: "
            f'jax.config.update("jax_num_cpu_devices", {count}); XLA_FLAGS and JAX_NUM_CPU_DEVICES may set another number'
        )
