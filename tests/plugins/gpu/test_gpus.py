"""GPU targets, and abstract GPU devices."""

import subprocess
import sys

import pytest

from axlearn_core.compose.devices import topology_devices
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_gpu import gpus, topology


@pytest.mark.parametrize("target", gpus.TARGETS, ids=lambda t: t.name)
def test_devices_of_absent_gpus_are_those_of_the_target(target):
    for name in target.examples:
        machine = find_machine(name)
        actual = topology_devices(machine)
        assert len(actual) == machine.devices
        assert actual[0].platform == "gpu"
        assert actual[0].device_kind in target.device_kinds
        assert [d.process_index for d in actual] == [i // machine.chips_per_host for i in range(machine.devices)]


def test_a_size_is_gpus_of_a_host_by_hosts():
    machine = find_machine("h100-8x64")
    assert (machine.chips, machine.domains, machine.devices_per_host) == (512, 64, 8)
    with pytest.raises(RequestError, match="expected: h100-CHIPSxHOSTS, such as h100-8x1"):
        find_machine("h100-512")


def test_figures_are_dense_and_of_one_device():
    for target in gpus.TARGETS:
        peaks = target.peak_flops
        assert peaks["float32"] < peaks["bfloat16"] < peaks["int8"]
        assert target.source
        assert target.hbm_bandwidth > target.link_bandwidth > target.network_bandwidth
        assert set(topology.CHIPS) >= {target.name}


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"XLA's GPU compiler is not installed\n.*pip install jax-cuda12-plugin"):
        topology_devices(find_machine("h100-8x1"))


@pytest.mark.slow
def test_the_compiler_is_not_heard_where_there_is_no_gpu():
    code = "import jax; assert jax.devices()[0].platform == 'cpu'"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
