"""Mosaic GPU for abstract GPUs: the architecture that lowering uses, and its limits."""

import contextlib
import importlib
import threading

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from axlearn_core.compose.compiler import lowering
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.gpus import TARGETS
from axlearn_plugins_gpu.kernels import mosaic
from support.gpu_programs import get_mesh

pytestmark = pytest.mark.usefixtures("library", "first_kernel")


@pytest.fixture
def jax_module():
    """The module of this JAX version that determines the architecture."""
    return next(m for m in map(importlib.import_module, reversed(compat.MOSAIC)) if hasattr(m, "_infer_arch"))


@contextlib.contextmanager
def compiling(target):
    """Trace and lower a kernel for a target."""
    with mosaic.use_mosaic_target(target), lowering(find_machine(f"{target}-8x1").target):
        yield


def test_every_kind_of_a_target_is_known():
    for target in TARGETS:
        for kind in target.device_kinds:
            assert mosaic.compute_capability(kind) == CHIPS[target.name].capability
    assert mosaic.compute_capability("NVIDIA GeForce RTX 4090") is None


@pytest.mark.fast_cases("b200")
@pytest.mark.slow_cases("h100")
@pytest.mark.parametrize("target", ["h100", "h200", "b200"])
def test_a_kernel_is_lowered_for_the_target_with_a_mesh_and_without(target, jax_module, first_kernel):
    with compiling(target):
        assert jax_module._infer_arch() == CHIPS[target].capability
    mesh = get_mesh(f"{target}-8x1", fsdp=8).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh), compiling(target):
        assert jax.sharding.get_abstract_mesh() == mesh
        assert jax_module._infer_arch() == CHIPS[target].capability
    assert first_kernel == {"kernel": CHIPS[target].capability}


def test_jax_has_its_own_function_back_once_a_program_is_lowered(jax_module):
    """Also if lowering fails, and if two threads lower concurrently and finish in the order in which they started."""
    original = jax_module._infer_arch
    assert original.__module__ == jax_module.__name__
    target = find_machine("b200-8x1").target

    def fail():
        with lowering(target):
            assert jax_module._infer_arch is not original
            raise ValueError("in the lowering")

    with pytest.raises(ValueError, match="in the lowering"):
        fail()
    assert jax_module._infer_arch is original

    begun, ended = threading.Event(), threading.Event()

    def lower_first():
        with lowering(target):
            begun.set()
            assert ended.wait(10)

    thread = threading.Thread(target=lower_first)
    thread.start()
    assert begun.wait(10)
    with lowering(target):
        ended.set()
        thread.join()
        assert jax_module._infer_arch is not original
    assert jax_module._infer_arch is original


def test_a_program_for_a_second_gpu_architecture_is_not_lowered(jax_module, first_kernel):
    with compiling("h100"):
        jax_module._infer_arch()
    with compiling("b200"), pytest.raises(RequestError, match=r"kernels for compute capability 9\.0 and cannot"):
        jax_module._infer_arch()
    assert first_kernel == {"kernel": (9, 0)}


def test_for_other_gpus_jax_gives_its_own_answer(jax_module):
    kind = AbstractDevice(device_kind="NVIDIA RTX", num_cores=1, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=kind)):
        own = jax_module._infer_arch()
        with lowering(find_machine("h100-8x1").target):
            assert jax_module._infer_arch() == own


def test_tokamax_is_told_of_the_target_and_of_this_machine_again():
    utils = mosaic.tokamax.module("gpu_utils")
    for target in ("h200", "b200"):
        with mosaic.use_mosaic_target(target):
            assert (utils.is_sm90(), utils.is_sm100()) == (target == "h200", target == "b200")
            assert utils.has_mosaic_gpu_support()
    assert (utils.is_sm90(), utils.is_sm100()) == (False, False)


def test_what_it_cannot_compile_for_is_refused(first_kernel):
    assert [mosaic.refusal(t) for t in ("h100", "h200", "b200")] == [None] * 3
    assert "a100 is neither" in mosaic.refusal("a100")
    first_kernel["kernel"] = (9, 0)
    assert mosaic.refusal("h200") is None
    assert "compute capability 9.0 and cannot switch" in mosaic.refusal("b200")
    first_kernel["kernel"] = (10, 0)
    assert mosaic.refusal("b200") is None
    assert "compute capability 10.0 and cannot switch" in mosaic.refusal("h100")


def test_a_jax_that_asks_in_another_way_compiles_for_hopper_only(monkeypatch):
    monkeypatch.setattr(compat, "MOSAIC", ("axlearn_core.errors", "axlearn_core.none"))
    assert mosaic.refusal("h100") is None
    assert "compiles only for Hopper, and b200 is not a Hopper GPU" in mosaic.refusal("b200")
