"""`--target` on this machine: has to be settled before JAX starts."""

import os
import re

from axlearn_core.errors import RequestError, nearest


def use_target(target: str | None) -> None:
    """Prepares the environment for `cpu` or `cpu-N` (N virtual devices); None uses what JAX finds.

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
            "    fix: without --target, training uses the accelerators that JAX finds"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={found[1] or 1}".strip()
