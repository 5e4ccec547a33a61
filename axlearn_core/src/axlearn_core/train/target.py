"""`--target` on this machine: settled before JAX looks for devices."""

import os
import re

import jax

from axlearn_core.contracts.target import cpu_devices


def use_target(target: str | None) -> None:
    """Runs on `cpu`, or on `cpu-N`: N virtual devices. None uses what JAX finds."""
    if target is not None:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices(target))
