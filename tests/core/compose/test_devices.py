"""What a process is given before JAX looks for devices."""

import os

import pytest

from axlearn_core.compose import devices
from axlearn_core.plugins.targets import find_machine


@pytest.mark.parametrize(("machine", "given"), [("cpu-8", 64), ("cpu-1", None), ("h100-8x1", None), (None, None)])
def test_virtual_devices_have_threads_to_wait_with(machine, given, monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(devices, "virtual", lambda count: None)
    devices.settle(machine and find_machine(machine))
    assert os.environ.get("PJRT_NPROC") == (given and str(max(given, os.cpu_count())))


def test_a_number_of_threads_that_somebody_set_is_kept(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "5")
    monkeypatch.setattr(devices, "virtual", lambda count: None)
    devices.settle(find_machine("cpu-8"))
    assert os.environ["PJRT_NPROC"] == "5"
