"""Run every test on eight virtual CPU devices, with JAX's strict rules for ranks and dtypes.

Programs are compiled quickly instead of well, because most of them run once. Tests and the commands that they start share a
compilation cache, so each program is compiled once.
"""

import atexit
import ctypes
import fnmatch
import gc
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from support.processor_time import SpeedMeter, standard_seconds

# XLA:CPU's fusion emitters take a third of the compile time. Newer versions have no flag to disable them.
FUSION = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
# Threads for eight virtual devices, as in `axlearn_core.compose.devices.configure_devices`. With one thread per device, they
# can deadlock. On a busy machine, they may also wait for longer than XLA's limit of 40 seconds, after which it aborts.
os.environ.setdefault("PJRT_NPROC", "64")
os.environ["HF_HUB_OFFLINE"] = "1"  # a path that does not exist may be a name on the hub
PATIENT = " --xla_cpu_collective_call_terminate_timeout_seconds=600"
# By default, XLA splits a program into up to 32 parts and prepares LLVM for each of them. The test processes use all cores.
UNSPLIT = " --xla_cpu_parallel_codegen_split_count=1"
FAST = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0" + FUSION + PATIENT + UNSPLIT
os.environ["JAX_PLATFORMS"] = "cpu"
# Workers inherit both. The commands that tests start use the flags of one device.
os.environ["XLA_FLAGS_OF_ONE_DEVICE"] = os.environ.get("XLA_FLAGS_OF_ONE_DEVICE", FAST)
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS_OF_ONE_DEVICE"] + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


# Processor seconds that the default suite may take, if set. `.ci/run` sets it, so that the suite stays short.
LIMIT = "AXLEARN_TESTS_PROCESSOR_SECONDS"
SPENT = pytest.StashKey[list[float]]()
METER = pytest.StashKey[SpeedMeter]()


def pytest_configure(config):
    config.stash[SPENT], config.stash[METER] = [], SpeedMeter()
    if hasattr(config, "workerinput"):
        atexit.register(_leave)  # before all other handlers, so that it is called after them
    gc.disable()  # until all tests are collected, because nothing that collection creates is garbage
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="axlearn-tests-")


def _leave():
    """End a worker without freeing each of its thousands of programs, which takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    """Let the first worker collect before the others, so that the test files are compiled once and not by each worker."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return (yield)
    collected, first = Path(tempfile.gettempdir(), f"axlearn-tests-{worker['testrunuid']}"), worker["workerid"] == "gw0"
    end = time.monotonic() + 120
    while not first and not collected.exists() and time.monotonic() < end:
        time.sleep(0.2)
    try:
        return (yield)
    finally:
        if first:
            collected.touch()
            atexit.register(collected.unlink, missing_ok=True)


def pytest_collection_finish(session):
    """Spare the collected tests from garbage collection, which would take a fifteenth of the processor time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure(config):
    gc.enable()
    if compiled := getattr(config, "compiled", None):
        shutil.rmtree(compiled, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config, items):
    """Mark the cases that `fast_cases` does not name, and the ones that `slow_cases` names, as slow."""
    used: set[tuple[str, str]] = set()
    for item in items:
        for marker in ("fast_cases", "slow_cases"):
            for mark in item.iter_markers(marker):
                matches = [p for p in mark.args if _matches(item, p)]
                used.update((_owner(item, mark), p) for p in matches)
                if bool(matches) == (marker == "slow_cases"):
                    item.add_marker(pytest.mark.slow)
    if any("::" in argument for argument in config.args):
        return  # some cases were not collected
    for item in items:
        for mark in (*item.iter_markers("fast_cases"), *item.iter_markers("slow_cases")):
            for pattern in mark.args:
                if (_owner(item, mark), pattern) not in used:
                    raise pytest.UsageError(f"{_owner(item, mark)}: {mark.name} names no case {pattern!r}")


def _matches(item, pattern):
    """Whether a pattern names the case or, in a class, the test."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    names = (case, item.originalname, f"{item.originalname}[{case}]")
    return pattern in names or any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for name in names)


def _owner(item, mark):
    """The test or class that has the mark."""
    on_test = mark in item.own_markers
    return item.nodeid.partition("[")[0] if on_test else item.nodeid.rpartition("::")[0].partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.config.stash[METER].sample()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    spent, meter = sum(os.times()[:4]), session.config.stash[METER]  # of this process and its children
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"processor_seconds": spent, "speed_samples": meter.samples}
        return
    total = session.config.stash[SPENT]
    total.append(spent if not total else sum(os.times()[:2]))  # workers report their own time
    limit = os.environ.get(LIMIT)
    if limit and standard_seconds(sum(total), meter.samples) > float(limit):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    output = getattr(node, "workeroutput", {})
    node.config.stash[SPENT].append(output.get("processor_seconds", 0.0))
    node.config.stash[METER].samples += output.get("speed_samples", [])


def pytest_terminal_summary(terminalreporter, config):
    spent, limit = sum(config.stash[SPENT]), os.environ.get(LIMIT)
    standard = standard_seconds(spent, config.stash[METER].samples)
    terminalreporter.write_line(f"processor time: {spent:.0f} s, {standard:.0f} s at the standard speed")
    if limit and standard > float(limit):
        terminalreporter.write_line(
            f"the suite took more than {limit} s of processor time (${LIMIT}): mark long tests as slow", red=True
        )


def pytest_addoption(parser):
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/goldens instead of comparing")


MEMORY = 3 << 30
"""Bytes of memory from which a test process frees its compiled programs."""


@pytest.fixture(autouse=True, scope="module")
def _free_programs(request):
    """Free compiled programs after slow tests, and if there are many.

    Otherwise the slow tests exceed the process's limit of memory mappings, and LLVM aborts. The others would take 7 GB.
    """
    yield
    slow = request.config.option.markexpr.startswith("slow")
    if "jax" in sys.modules and (slow or _memory() > MEMORY):
        sys.modules["jax"].clear_caches()
        gc.collect()
        if trim := getattr(
            ctypes.CDLL(None), "malloc_trim", None
        ):  # glibc would keep the memory, and each module would end here
            trim(0)


def _memory():
    """Resident bytes of this process, or 0 if the system does not say."""
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statistics.exists() else 0


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that installs a distribution for one test.

    It creates a real dist-info folder and real modules on `sys.path`.
    `install(name, version, modules={...}, points={group: {name: value}}, requires=(...))` returns the folder.
    """
    written: set[str] = set()

    def make(
        name: str,
        version: str = "1.0",
        *,
        modules: Mapping[str, str] = {},
        points: Mapping[str, Mapping[str, str]] = {},
        requires: tuple[str, ...] = ("axlearn-core>=0.1",),
        folder: str | None = None,
    ) -> Path:
        site = tmp_path / "sites" / (folder or f"{name}-{version}")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), ""]))
        sections = (
            f"[axlearn.{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
            for group, entries in points.items()
        )
        (info / "entry_points.txt").write_text("\n".join(sections))
        for module, source in modules.items():
            (site / f"{module}.py").write_text(textwrap.dedent(source))
            written.add(module)
        monkeypatch.syspath_prepend(str(site))
        return site

    yield make
    for module in written:
        sys.modules.pop(module, None)
