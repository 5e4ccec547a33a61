"""The environment of a process before JAX looks for devices."""

import os

import pytest

from axlearn_core.compose import devices
from axlearn_core.plugins import backends
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_core.plugins.targets import find_machine


@pytest.mark.parametrize(("machine", "flags"), [("cpu-8", 64), ("cpu-1", None), ("h100-8x1", None), (None, None)])
def test_virtual_devices_have_threads_to_wait_with(machine, flags, monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(devices, "virtual", lambda count: None)
    devices.configure_devices(machine and find_machine(machine))
    assert os.environ.get("PJRT_NPROC") == (flags and str(max(flags, os.cpu_count())))


def test_hardware_that_is_not_here_is_told_before_jax_looks_for_it(monkeypatch):
    """By the hook `axlearn_before_devices`, which may omit its argument."""
    monkeypatch.setattr(backends, "has_jax_started", lambda: False)
    calls = []

    class Silent:
        @hookimpl
        def axlearn_before_devices(self):
            calls.append("called")

    manager, plugin = devices.host().manager, Silent()
    manager.register(plugin)
    try:
        assert calls == []
        devices.configure_devices(None)
    finally:
        manager.unregister(plugin)
    assert calls == ["called"]


def test_a_number_of_threads_that_somebody_set_is_kept(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "5")
    monkeypatch.setattr(devices, "virtual", lambda count: None)
    devices.configure_devices(find_machine("cpu-8"))
    assert os.environ["PJRT_NPROC"] == "5"


class Device:
    def __init__(self, kind, slice_index=None):
        self.device_kind = kind
        if slice_index is not None:
            self.slice_index = slice_index


H100, V5E, V5P, TRN2, V7X = "NVIDIA H100 80GB HBM3", "TPU v5 lite", "TPU v5p", "NC_v3d", "TPU7x"


@pytest.mark.parametrize(
    ("visible_devices", "name"),
    [
        ([Device(H100)] * 8, "h100-8x1"),
        ([Device(H100)], "h100-1x1"),
        ([Device(V5E, 0)] * 16, "tpu-v5e-16"),
        ([Device(V5E, i // 16) for i in range(32)], "tpu-v5e-16x2"),
        ([Device(V5P, 0)] * 4, "tpu-v5p-8"),
        ([Device(V7X, 0)] * 8, "tpu-7x-4"),
        ([Device(V7X, 0)] * 7, None),  # a chip and a half
        ([Device(V5E, min(i, 1)) for i in range(7)], None),  # slices of different sizes
        ([Device(TRN2)] * 64, "trn2-16x1"),
        ([Device("cpu")], "cpu"),
        ([Device("cpu")] * 8, "cpu-8"),
        ([Device("Abacus")] * 4, None),
        ([Device(H100), Device("NVIDIA H200")], None),
    ],
)
def test_the_machine_that_jax_sees(visible_devices, name, monkeypatch):
    monkeypatch.setattr(devices.jax, "devices", lambda: visible_devices)
    detected = devices.detect()
    assert (detected.machine and detected.machine.name) == name
    if name:
        assert detected.machine == find_machine(name)
        assert detected.machine.devices == len(visible_devices)
    assert f" x {visible_devices[0].device_kind}" in detected.description


@pytest.mark.parametrize(("hosts", "name"), [(1, "h100-16x1"), (2, "h100-8x2"), (3, None)])
def test_gpus_are_counted_by_host_whatever_the_processes(hosts, name, monkeypatch):
    monkeypatch.setattr(devices.jax, "devices", lambda: [Device(H100)] * 16)
    monkeypatch.setattr(devices.jax, "process_count", lambda: 16)
    names = devices.np.arange(16) % hosts
    monkeypatch.setattr(devices.multihost_utils, "process_allgather", lambda own: names)
    machine = devices.detect().machine
    assert (machine and machine.name) == name
