"""Private imports, patches, and environment variables. Each distribution keeps its own in one module with this name.

A test forbids `_src`, `jaxlib._jax`, `unittest.mock`, patches, assignments to `__class__`, and changes to the environment in all
other modules. Each `compat` module explains why each item is needed, for which versions, and when it can be removed.

The core needs:

- `jax._src.distributed` (0.10 to 0.12): the coordinator's client, and a process's index before JAX has started. Remove it
  when JAX has public equivalents.
- `jax._src.xla_bridge` (0.10 to 0.12): whether JAX has started. Remove it when JAX has a public equivalent.
- three environment variables that JAX reads once, and one that the `tokenizers` library reads.
- `GLIBC_TUNABLES` (glibc 2.35 and later), which glibc reads when a process starts. Remove it when `mallopt` supports huge pages, or
  when XLA reuses one step's memory for the next.
- the `__class__` of two packages (all versions of Python). Python looks up `__call__` on the class of an object, and assigning
  `__class__` is the documented way to change the class of a module ("Customizing module attribute access" in the language
  reference). Remove it when modules support `__call__`.
"""

import contextlib
import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

_lock = threading.Lock()
TUNABLES = ("glibc.malloc.hugetlb=1", "glibc.cpu.x86_non_temporal_threshold=8388608")
"""Settings for training processes. Huge pages: XLA's CPU client frees the memory after each step, and allocating it again in
4 KiB pages can take a third of the step time. Copies of at least 8 MiB, such as those made by a save, bypass the caches. By
default, glibc's threshold is three eighths of the last-level cache, which can be hundreds of MB."""
RESTARTED = "AXLEARN_RESTARTED"
_values: dict[tuple[int, str], list[tuple[object, object]]] = {}
"""Original value and active replacements, oldest first, by (owner, name). Each entry is (token, value)."""


@contextlib.contextmanager
def override_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute inside this context, for libraries that query this machine instead of the target.

    Several threads may replace the same attribute and exit in any order. The last one restores the original.

    Args:
        owner: Module or class that defines the attribute.
        name: Name of the attribute.
        value: Replacement.

    Raises:
        AttributeError: If the attribute does not exist, for example in a different version of the library.
    """
    key, entry = (id(owner), name), (object(), value)
    with _lock:
        original = getattr(owner, name)
        _values.setdefault(key, [(owner, original)]).append(entry)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            _values[key].remove(entry)
            setattr(owner, name, _values[key][-1][1])
            if len(_values[key]) == 1:
                del _values[key]


class CallablePackage(ModuleType):
    """A package that can be called: `ax.train(...)` calls `axlearn_core.train.train(...)`.

    Importing `axlearn_core.train.loop` sets the attribute `train` of `axlearn_core` to the package, which hides the function
    with the same name. `help(ax.train)` shows the function.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Callable[..., Any]:
        return getattr(self, self.__name__.rpartition(".")[2])  # may be lazy in the package

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Docstring of the function."""
        function = self._function
        return f"{function.__name__}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports modules lazily.

    Args:
        package: Name of the package.
        modules: Module in the package that defines each name.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return load


def make_callable(name: str) -> None:
    """Make a package callable. Call this while the package is being imported."""
    sys.modules[name].__class__ = CallablePackage


def coordination_client() -> Any:
    """Return the client of the job's coordinator, a key-value store with timeouts. None in a single-process job."""
    return importlib.import_module("jax._src.distributed").global_state.client


def replace_coordination_client(client: Any) -> None:
    """Make an object the client that `coordination_client` returns, for simulations of a job in one process."""
    importlib.import_module("jax._src.distributed").global_state.client = client


def coordinator_address() -> str | None:
    """Return `host:port` of the job's coordinator. None in a single-process job."""
    return importlib.import_module("jax._src.distributed").global_state.coordinator_address


def has_jax_started() -> bool:
    """Return True if JAX has initialized its backends. Does not import JAX."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def process_index() -> int:
    """Return the index of this process in its job. Unlike `jax.process_index`, this neither imports nor starts JAX."""
    jax: Any = sys.modules.get("jax")
    if has_jax_started():
        return jax.process_index()
    return 0 if jax is None else importlib.import_module("jax._src.distributed").global_state.process_id


def requested_platforms() -> tuple[str, ...] | None:
    """Return the platforms in `JAX_PLATFORMS` or `jax_platforms`. None if JAX tries all installed platforms."""
    jax: Any = sys.modules.get("jax")
    value = os.environ.get("JAX_PLATFORMS") if jax is None else jax.config.jax_platforms
    return tuple(name.strip() for name in value.split(",")) if value else None


def assign_environment(variables: Mapping[str, str], *, only: bool = False) -> None:
    """Set environment variables in a process that started before they were known, such as a warm trainer.

    Args:
        variables: Values by name.
        only: If True, remove all other variables.
    """
    if only:
        os.environ.clear()
    os.environ.update(variables)


def use_cpu(*, override: bool = False) -> None:
    """Prevent JAX from initializing accelerators. For commands and worker processes that do not compute.

    Args:
        override: If True, replace the user's `JAX_PLATFORMS`.
    """
    if override:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def disable_tokenizer_threads() -> None:
    """Disable tokenizer threads. For processes that share cores, because each tokenizer would otherwise use all of them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_thread_count(devices: int) -> None:
    """Make XLA start enough threads for virtual CPU devices.

    A device blocks a thread while it waits for other devices in a loop, and several loops can run concurrently. With one
    thread per device, waiting devices can occupy all threads and deadlock.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(8 * devices, os.cpu_count() or 1)))


def forget_device_count() -> None:
    """Remove the number of virtual CPU devices from `XLA_FLAGS`. JAX rejects it together with `jax_num_cpu_devices`."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()


def glibc_tunables(environment: Mapping[str, str]) -> str:
    """Return `GLIBC_TUNABLES` for a training process: the value in `environment`, plus our defaults."""
    present = [tunable for tunable in environment.get("GLIBC_TUNABLES", "").split(":") if tunable]
    names = {tunable.partition("=")[0] for tunable in present}
    return ":".join([*present, *(tunable for tunable in TUNABLES if tunable.partition("=")[0] not in names)])


def restart_with_tunables() -> None:
    """Restart this program in the same process with `glibc_tunables`. Child processes get the original environment.

    Call this first, because the program repeats everything that ran before the call. It does nothing if the settings are already
    present or were already tried, if the C library is not glibc, if a debugger is attached, or if the program is read from standard
    input.
    """
    tunables, this, current = glibc_tunables(os.environ), str(os.getpid()), os.environ.get("GLIBC_TUNABLES", "")
    process, _, users = os.environ.pop(RESTARTED, "").partition(" ")
    if process == this:  # a Python binary with capabilities always loses the settings, so do not restart again
        os.environ.pop("GLIBC_TUNABLES", None)
        os.environ.update({"GLIBC_TUNABLES": users} if users else {})
        return
    has_glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names
    can_begin_again = sys.executable and sys.argv[0] not in ("", "-") and sys.gettrace() is None
    if not has_glibc or not can_begin_again or current == tunables:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        environment = os.environ | {"GLIBC_TUNABLES": tunables, RESTARTED: f"{this} {current}"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
