"""What libraries do not give. Each distribution has one module of this name for private imports, patches and the environment.

A test reads the source and fails on `_src`, `jaxlib._jax`, `unittest.mock` and changes of the environment anywhere else. Each
such module says why each thing is needed, with which versions, and what would make it unnecessary.

Here: the client of the coordinator, `jax._src.distributed` (0.10 to 0.12; not needed once it has a public name), and three
environment variables, which JAX reads once and has no other way to be told.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
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


def coordination_client() -> Any:
    """The client of the job's coordinator, a key-value store with time limits; None in a job of one process."""
    return importlib.import_module("jax._src.distributed").global_state.client


def coordinator_address() -> str | None:
    """`host:port` of the job's coordinator; None in a job of one process."""
    return importlib.import_module("jax._src.distributed").global_state.coordinator_address


def assign_environment(variables: Mapping[str, str], *, only: bool = False) -> None:
    """Sets variables of a process that was started before it was known what it would be, such as a warm trainer.

    Args:
        variables: name -> value.
        only: remove all others.
    """
    if only:
        os.environ.clear()
    os.environ.update(variables)


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
