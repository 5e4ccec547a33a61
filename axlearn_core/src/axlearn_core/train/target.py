"""`--target` on this machine: settled before JAX looks for devices."""

import os
import re

import jax

from axlearn_core.errors import RequestError, nearest


def use_target(target: str | None) -> None:
    """Runs on `cpu`, or on `cpu-N`: N virtual devices. None uses what JAX finds.

    Raises:
        RequestError: hardware that this version cannot run on by name.
    """
    if target is None:
        return
    found = re.fullmatch(r"cpu(?:-([1-9]\d*))?", target)
    if not found:
        close = nearest(target, ["cpu", "cpu-8"])
        raise RequestError(
            f"unknown target {target!r}\n"
            + (f"    did you mean: {', '.join(close)}?\n" if close else "")
            + "    expected: cpu, or cpu-N for N virtual devices\n"
            "    fix: without a target, training uses the accelerators that JAX finds"
        )
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(found[1] or 1))
