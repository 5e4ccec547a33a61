"""What libraries do not give. Each distribution has one module of this name for private imports, patches and the environment.

A test reads the source and fails on `_src`, `jaxlib._jax`, `unittest.mock`, patches, assignments to `__class__` and changes of the
environment anywhere else. Each such module says why each thing is needed, with which versions, and what would make it unnecessary.

Of the core:

- `jax._src.distributed` (0.10 to 0.12): the client of the coordinator. Not needed once it has a public name.
- three environment variables, which JAX reads once, and one of the `tokenizers` library.
- `GLIBC_TUNABLES` (glibc 2.35 and later), which is read when a process starts. Not needed once `mallopt` can ask for huge pages, or
  XLA keeps the memory of a step for the next one.
- the `__class__` of two packages (all versions of Python): Python looks up `__call__` on the class of an object, and gives a module
  that class in one way only ("Customizing module attribute access" in its reference). Not needed once modules have `__call__`.
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
"""For processes that train. Memory comes in huge pages: XLA's CPU client gives a step's memory back after each, and to be given it
again in pages of 4 KiB may take a third of the time. Copies of 8 MiB and more, as those of a save, go past the caches: by default
glibc does that from three eighths of the last cache on, which may be hundreds of MB."""
RESTARTED = "AXLEARN_RESTARTED"
_values: dict[tuple[int, str], list[tuple[object, object]]] = {}
"""(owner, name) -> (token, value) of the original and of each replacement in force, the oldest first."""


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """While it lasts, `owner.name` is `value`; for modules of libraries that ask this machine instead of the target.

    Several threads may replace one attribute; the original is back once the last of them is done, in whatever order they end.

    Args:
        owner: a module or class that has the attribute itself.
        name: of the attribute.
        value: what stands in its place.

    Raises:
        AttributeError: it has no such attribute, such as in another version.
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
    """A package that is called by its own name: `ax.train(...)` is `axlearn_core.train.train(...)`.

    Importing `axlearn_core.train.loop` makes the package `train` an attribute of `axlearn_core`, where the function of this name
    belongs. `help(ax.train)` shows the function.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Callable[..., Any]:
        return getattr(self, self.__name__.rpartition(".")[2])  # may be lazy in the package

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """That of the function."""
        function = self._function
        return f"{function.__name__}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports the module of a name when the name is first used.

    Args:
        package: its name.
        homes: name -> the module in the package that defines it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return load


def make_callable(name: str) -> None:
    """Makes a package callable, while it is imported."""
    sys.modules[name].__class__ = CallablePackage


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


def one_core_for_tokenizers() -> None:
    """For one of several processes that share the cores: a tokenizer would take all of them in each."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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


def glibc_tunables(environment: Mapping[str, str]) -> str:
    """`GLIBC_TUNABLES` for a process that trains: those of `environment`, and of ours what they do not set."""
    own = [tunable for tunable in environment.get("GLIBC_TUNABLES", "").split(":") if tunable]
    names = {tunable.partition("=")[0] for tunable in own}
    return ":".join([*own, *(tunable for tunable in TUNABLES if tunable.partition("=")[0] not in names)])


def restart_with_tunables() -> None:
    """Starts this program anew as the same process, with `glibc_tunables`; its own children get the environment as it was.

    To be called first of all: what the program has done until then it does twice. It returns where the settings are there
    already or were tried, and where nothing can begin again: another C library, a debugger, a program on standard input.
    """
    tunables, this, own = glibc_tunables(os.environ), str(os.getpid()), os.environ.get("GLIBC_TUNABLES", "")
    process, _, users = os.environ.pop(RESTARTED, "").partition(" ")
    if process == this:  # also of a Python with capabilities, which loses the settings whenever it starts
        os.environ.pop("GLIBC_TUNABLES", None)
        os.environ.update({"GLIBC_TUNABLES": users} if users else {})
        return
    has_glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names
    can_begin_again = sys.executable and sys.argv[0] not in ("", "-") and sys.gettrace() is None
    if not has_glibc or not can_begin_again or own == tunables:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        environment = os.environ | {"GLIBC_TUNABLES": tunables, RESTARTED: f"{this} {own}"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
