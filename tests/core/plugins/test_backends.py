"""Every entry point prepares the process before JAX starts, and leaves it alone afterwards."""

import os
import subprocess
import sys
import types
from contextlib import nullcontext

import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core import compat
from axlearn_core.compose import Functional, devices
from axlearn_core.errors import AxlearnError
from axlearn_core.plugins import backends
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.targets import find_machine
from axlearn_core.run import Run


class Recorder:
    def __init__(self):
        self.calls = []

    @hookimpl
    def axlearn_before_devices(self, platforms):
        self.calls.append(platforms)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the hook, in a process in which JAX has not started."""
    monkeypatch.setattr(backends, "has_jax_started", lambda: False)
    recorder = Recorder()
    host().manager.register(recorder)
    yield recorder.calls
    host().manager.unregister(recorder)


@pytest.fixture(scope="module")
def config():
    small = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "input.sequence_length": 16}
    return ax.resolve("quickstart", set=small).config


def run_op(_):
    from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp

    x = np.ones((1, 2, 4), np.float32)
    RMSNormOp(x, x[0, 0], eps=1e-5).run()


ENTRIES = {
    "ax.resolve": lambda _: ax.resolve("quickstart"),
    "ax.compose": ax.compose,
    "ax.load": lambda _: ax.load("missing"),
    "ax.open_weights": lambda _: ax.open_weights("missing"),
    "ax.train": lambda config: ax.train(config, run_dir="s3://"),
    "Run.weights": lambda _: Run("missing").weights(),
    "Functional": lambda config: Functional.from_config(config.model),
    "Op.run": run_op,
    "detect_for": lambda _: devices.detect_for(object()),
    "local_devices": lambda _: devices.local_devices(None),
    "cpu target": lambda _: devices.configure_devices(find_machine("cpu-1")),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_point_prepares_the_process(entry, calls, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "virtual", lambda count: None)
    fails = entry in ("ax.load", "ax.open_weights", "ax.train", "Run.weights")
    with pytest.raises(AxlearnError) if fails else nullcontext():
        ENTRIES[entry](config)
    assert calls


def test_nothing_is_prepared_after_jax_has_started(calls, monkeypatch):
    monkeypatch.setattr(backends, "has_jax_started", lambda: True)
    backends.prepare_backends()
    assert calls == []


@pytest.mark.parametrize(
    ("value", "platforms"), [(None, None), ("", None), ("cpu", ("cpu",)), ("cuda, cpu", ("cuda", "cpu"))]
)
def test_plugins_learn_what_the_user_requested(value, platforms, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(config=types.SimpleNamespace(jax_platforms=value)))
    assert compat.requested_platforms() == platforms
    monkeypatch.delitem(sys.modules, "jax")
    if value is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    else:
        monkeypatch.setenv("JAX_PLATFORMS", value)
    backends.prepare_backends()
    assert calls == [platforms]


def test_whether_jax_has_started(monkeypatch):
    assert compat.has_jax_started() == sys.modules["jax._src.xla_bridge"].backends_are_initialized()
    monkeypatch.delitem(sys.modules, "jax._src.xla_bridge")
    assert not compat.has_jax_started()


@pytest.mark.slow
def test_a_message_does_not_start_jax(tmp_path):
    code = (
        "from axlearn_core.run.notices import log_message; log_message('one')\n"
        "import jax; log_message('two')\n"
        "from axlearn_core.compat import has_jax_started; print(has_jax_started())\n"
        "jax.devices(); log_message('three'); print(has_jax_started())"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (process.stdout, process.stderr) == ("False\nTrue\n", "one\ntwo\nthree\n")


VARIABLES = {
    "axlearn_plugins_gpu": ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK",),
    "axlearn_plugins_tpu": ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"),
}


@pytest.mark.parametrize("has_hardware", [False, True])
@pytest.mark.parametrize("platforms", [None, ("cpu",), ("cuda", "cpu"), ("tpu",)])
@pytest.mark.parametrize("plugin", VARIABLES)
def test_errors_are_hidden_only_without_hardware_or_a_request(plugin, platforms, has_hardware, monkeypatch):
    hooks = pytest.importorskip(f"{plugin}.hooks", reason=f"needs {plugin}")
    for name in VARIABLES[plugin]:
        monkeypatch.setenv(name, "")  # so that the test restores it
        monkeypatch.delenv(name)
    if plugin == "axlearn_plugins_tpu":
        monkeypatch.setattr(hooks, "has_local_tpu", lambda: has_hardware)
    else:
        monkeypatch.setattr(hooks.Path, "exists", lambda self: has_hardware)
    hooks.axlearn_before_devices(platforms)
    hidden = platforms is None and not has_hardware
    assert [name in os.environ for name in VARIABLES[plugin]] == [hidden] * len(VARIABLES[plugin])
