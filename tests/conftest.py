"""Every test runs on eight virtual CPU devices, with JAX's strict rules for ranks and dtypes.

Programs are compiled fast rather than well: most of them run once. One that several tests use is compiled once: they
share a cache, also with the commands that they start.
"""

import os
import shutil
import sys
import tempfile
from importlib.metadata import version

import pytest

# A third of the time to compile goes into XLA:CPU's fusion emitters; newer versions have no flag to leave them out.
FUSION = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
# Threads for eight virtual devices, as `axlearn_core.compose.devices.configure_devices` asks for them: with one for each
# they may wait for one another for ever. On a busy machine they may also wait for longer than XLA's 40 seconds, after which it
# aborts.
os.environ.setdefault("PJRT_NPROC", "64")
PATIENT = " --xla_cpu_collective_call_terminate_timeout_seconds=600"
FAST = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0" + FUSION + PATIENT
os.environ["JAX_PLATFORMS"] = "cpu"
# Workers inherit both. Of one device: for the commands that tests start.
os.environ["XLA_FLAGS_OF_ONE_DEVICE"] = os.environ.get("XLA_FLAGS_OF_ONE_DEVICE", FAST)
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS_OF_ONE_DEVICE"] + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def pytest_configure(config):
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="axlearn-tests-")


def pytest_unconfigure(config):
    if compiled := getattr(config, "compiled", None):
        shutil.rmtree(compiled, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--update-goldens", action="store_true", help="write tests/goldens anew instead of comparing")


@pytest.fixture(autouse=True, scope="module")
def _programs_are_given_back(request):
    """Hundreds of the slow tests' programs in one process come to its limit of mappings, where LLVM aborts."""
    yield
    if request.config.option.markexpr.startswith("slow") and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
