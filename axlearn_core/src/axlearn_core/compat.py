"""What libraries do not give. Each distribution has one module of this name for private imports, patches and the environment.

A test reads the source and fails on `_src`, `jaxlib._jax`, `unittest.mock` and changes of the environment anywhere else. Each
such module says why each thing is needed, with which versions, and what would make it unnecessary. The core imports nothing
private. It sets three environment variables of JAX, which reads them once and has no other way to be told (0.10 to 0.12).
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While it lasts, `owner.name` is `value`; for modules of libraries that ask this machine instead of the target.

    Args:
        owner: a module or class that has the attribute itself.
        name: of the attribute.
        value: what stands in its place.

    Raises:
        AttributeError: it has no such attribute, such as in another version.
    """
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def only_cpu(*, always: bool = False) -> None:
    """Keeps JAX from looking for accelerators, for commands and worker processes that compute nothing.

    Args:
        always: also where the user has set `JAX_PLATFORMS`.
    """
    if always:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def threads_for(devices: int) -> None:
    """As many threads as virtual CPU devices need.

    A device that waits for others in a loop holds a thread, and loops run beside one another: with as many threads as devices,
    some may hold all of them and wait for those that have none.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(8 * devices, os.cpu_count() or 1)))


def forget_device_count() -> None:
    """Removes the number of virtual CPU devices from `XLA_FLAGS`, which JAX refuses beside `jax_num_cpu_devices`."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()
