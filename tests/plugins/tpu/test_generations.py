"""TPU machines by name, and the shapes of their slices."""

import functools
import os
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from axlearn_core.compose.devices import topology_devices
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_plan.collectives import collectives
from axlearn_plugins_plan.groups import Places
from axlearn_plugins_plan.hlo import parse
from axlearn_plugins_tpu.generations import TARGETS
from axlearn_plugins_tpu.hooks import has_local_tpu
from axlearn_plugins_tpu.shapes import SLICES, find_shape
from axlearn_plugins_tpu.topology import topology_name
from support.needs import require


@pytest.mark.parametrize(
    ("name", "chips", "devices", "domains", "topology"),
    [
        ("tpu-v4-8", 4, 4, 1, "v4:2x2x1"),
        ("tpu-v5p-2", 1, 1, 1, "v5p:1x1x1"),
        ("tpu-v5p-32", 16, 16, 1, "v5p:2x2x4"),
        ("tpu-v5p-512", 256, 256, 1, "v5p:4x8x8"),
        ("tpu-v5p-1024", 512, 512, 1, "v5p:8x8x8"),
        ("tpu-v5p-16384x4", 32768, 32768, 4, "v5p:16x16x32"),
        ("tpu-v5p-17920", 8960, 8960, 1, "v5p:16x20x28"),
        ("tpu-v5e-8", 8, 8, 1, "v5e:2x4"),
        ("tpu-v5e-256x4", 1024, 1024, 4, "v5e:16x16"),
        ("tpu-v6e-128", 128, 128, 1, "v6e:8x16"),
        ("tpu-7x-4", 4, 8, 1, "tpu7x:2x2x1"),
        ("tpu-7x-256x2", 512, 1024, 2, "tpu7x:4x8x8"),
    ],
)
def test_a_name_means_a_machine(name, chips, devices, domains, topology):
    machine = find_machine(name)
    assert (machine.chips, machine.devices, machine.domains) == (chips, devices, domains)
    assert topology_name(machine) == topology


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tpu-v5p-1000", ["500 chips", "tpu-v5p-896, tpu-v5p-1024", "8,960"]),
        ("tpu-v5p-20000", ["10,000 chips", "nearest: tpu-v5p-16384, tpu-v5p-17920\n"]),
        ("tpu-v5e-512", ["512 chips", "tpu-v5e-256", "tpu-v5e-256x2"]),
        ("tpu-v4-2", ["1 chips", "nearest: tpu-v4-8"]),
        ("tpu-v6e-7x3", ["7 chips", "tpu-v6e-4, tpu-v6e-8"]),
    ],
)
def test_a_size_that_no_slice_has_is_an_error_that_says_what_there_is(name, says):
    with pytest.raises(RequestError) as error:
        topology_devices(find_machine(name))
    assert not [s for s in says if s not in str(error.value)], str(error.value)


def test_every_listed_shape_is_found_and_close_to_a_cube():
    for name, slices in SLICES.items():
        for shape in slices.small:
            chips = 1
            for n in shape:
                chips *= n
            assert find_shape(name, chips) == shape
    assert find_shape("tpu-v5p", 6144) == (16, 16, 24)
    assert find_shape("tpu-7x", 9216) == (16, 24, 24)


@pytest.mark.slow_cases("tpu-v5p")
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_devices_of_absent_tpus_are_those_of_the_target(target):
    require("libtpu")
    for name in target.examples:
        machine = find_machine(name)
        actual = topology_devices(machine)
        assert len(actual) == machine.devices
        assert actual[0].platform == "tpu"
        assert actual[0].device_kind in target.device_kinds
        assert len({getattr(d, "slice_index", 0) for d in actual}) == machine.domains


def test_figures_are_those_of_a_device():
    by_name = {t.name: t for t in TARGETS}
    assert all(t.peak_flops["bfloat16"] > 1e14 and t.source and t.examples for t in TARGETS)
    assert by_name["tpu-7x"].peak_flops["bfloat16"] * 2 == 2307e12  # a chip has two devices
    assert by_name["tpu-v5p"].peak_flops["bfloat16"] == 459e12


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("axlearn_plugins_tpu.topology.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'jax\[tpu\]'"):
        topology_devices(find_machine("tpu-v5p-8"))


def test_hooks_import_no_jax():
    code = "import sys, axlearn_plugins_tpu.hooks; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([], False), ([("0x1ae0", "0x0042"), ("0x10de", "0x2330")], False), ([("0x1ae0", "0x0063")], True)],
)
def test_a_tpu_on_the_bus_is_seen(devices, expected, tmp_path):
    for number, (vendor, kind) in enumerate(devices):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "device").write_text(f"{kind}\n")
    assert has_local_tpu(tmp_path) is expected


@pytest.mark.slow
def test_jax_starts_in_silence_where_libtpu_is_and_no_tpu():
    require("libtpu")
    if has_local_tpu():
        pytest.skip("needs a machine without a TPU")
    hidden = ("JAX_PLATFORMS", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    code = (
        "from axlearn_core.compose.devices import configure_devices; configure_devices(None)\n"
        "import jax; print(jax.default_backend())"
    )
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout, process.stderr) == (0, "cpu\n", "")


@pytest.mark.slow
def test_programs_are_compiled_in_several_processes_at_once():
    require("libtpu")
    code = (
        "import sys; from axlearn_core.compose.devices import topology_devices\n"
        "from axlearn_core.plugins.targets import find_machine\n"
        "print(len(topology_devices(find_machine('tpu-v5e-16'))), flush=True); sys.stdin.read()"
    )
    start = functools.partial(
        subprocess.Popen, [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with start() as one, start() as two:
        lines = [p.stdout.readline() for p in (one, two)]  # both hold libtpu now
        for process in (one, two):
            process.communicate("")
    assert lines == ["16\n", "16\n"]


@pytest.mark.parametrize("generation", ["tpu-v4-8", "tpu-v5e-4", "tpu-v5p-8", "tpu-v6e-4", "tpu-7x-4"])
def test_libtpu_knows_every_option_of_a_target(generation):
    require("libtpu")
    machine = find_machine(generation)
    place = jax.sharding.SingleDeviceSharding(topology_devices(machine)[0])
    lowered = jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((8, 128), "float32", sharding=place))
    assert machine.target.compiler_options
    lowered.lower(lowering_platforms=("tpu",)).compile(compiler_options=dict(machine.target.compiler_options))


@pytest.mark.slow
def test_not_every_collective_is_waited_for():
    """By default libtpu waits for every collective of this program on v5p; the bytes are the same."""
    require("libtpu")
    machine = find_machine("tpu-v5p-8")
    mesh = jax.sharding.Mesh(np.array(topology_devices(machine)), ("fsdp",))
    rows, split = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p)) for p in (("fsdp",), (None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct((4, 1024, 2048), "bfloat16", sharding=rows)
    weights = (jax.ShapeDtypeStruct((4, 2048, 2048), "bfloat16", sharding=split),) * 2

    def loss(weights, x):
        def layer(x, weights):
            return jax.lax.with_sharding_constraint(x + jax.nn.silu(x @ weights[0]) @ weights[1], rows), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype("float32") ** 2).mean()

    traced = jax.jit(jax.grad(loss), out_shardings=(split, split)).trace(weights, x)
    lowered = traced.lower(lowering_platforms=("tpu",))
    waited, overlapped = (
        lowered.compile(compiler_options=o).as_text() for o in (None, dict(machine.target.compiler_options))
    )
    kinds = {"all-gather": 4, "reduce-scatter": 2}
    places = Places({"fsdp": 4}, np.zeros(4, int))
    for text, hidden in ((waited, False), (overlapped, True)):
        actual = [c for c in collectives(parse(text), places) if c.kind in kinds]
        assert Counter(c.kind for c in actual) == kinds
        assert any(c.asynchronous for c in actual) == hidden
