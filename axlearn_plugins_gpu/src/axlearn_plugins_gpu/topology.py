"""Abstract JAX devices that represent GPUs. XLA's GPU compiler can compile for them without a GPU."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS


def devices(machine: Machine) -> Sequence[Any]:
    """Return the GPUs of a machine, ordered by host, as compilation targets.

    Raises:
        RequestError: If XLA's GPU compiler is not installed.
    """
    _register(machine)
    hosts = machine.domains
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(machine),
        topology=f"1x{hosts}x{machine.chips_per_host}",  # partitions, hosts, GPUs per host
    )
    return topology.devices


def target_config(machine: Machine) -> str:
    """Return the GPU as an XLA `GpuTargetConfigProto` in text format."""
    target, chip = machine.target, CHIPS[machine.target.name]
    major, minor = chip.capability
    extension = "ACCELERATED_FEATURES" if chip.accelerated else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_core: {chip.shared}
  shared_memory_per_block_optin: {chip.shared - 1024}
  threads_per_core_limit: 2048
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.hbm_bandwidth or 0)}
  l2_cache_size: {chip.l2}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {int(target.hbm_bytes or 0)}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{target.device_kinds[0]}"
"""


def _register(machine: Machine) -> None:
    """Register the CUDA platform with JAX, on a machine without GPUs."""
    plugins = [f"xla_cuda{n}" for n in (12, 13) if importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None]
    if not plugins:
        raise RequestError(
            f"cannot compile for {machine.name!r}: XLA's GPU compiler is not installed\n"
            "    fix: pip install jax-cuda12-plugin, in the version of jax (Linux only)"
        )
    # Otherwise JAX's CUDA plugin searches for the libraries of a GPU and refuses to start.
    compat.skip_cuda_check()
    jax.devices("cpu")  # makes JAX discover its plugins
    if not compat.has_platform("cuda"):
        # JAX discovered its plugins earlier, and the CUDA plugin refused to start.
        importlib.import_module(f"jax_plugins.{plugins[0]}").initialize()
