"""Mosaic GPU for GPUs that are not here: what its lowering is told of them, and what it cannot be told."""

import importlib

import jax
import pytest
from gpu_programs import mesh_of
from jax.sharding import AbstractDevice, AbstractMesh

from axlearn_core.errors import RequestError
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.kernels import mosaic
from axlearn_plugins_gpu.targets import TARGETS

pytestmark = pytest.mark.usefixtures("library", "first_kernel")


def lowering():
    """The module of this JAX that asks for the architecture."""
    return next(m for m in map(importlib.import_module, reversed(compat.MOSAIC)) if hasattr(m, "_infer_arch"))


def test_every_kind_of_a_target_is_known():
    for target in TARGETS:
        for kind in target.device_kinds:
            assert mosaic.capability_of(kind) == CHIPS[target.name].capability
    assert mosaic.capability_of("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("target", ["h100", "h200", "b200"])
def test_a_kernel_is_lowered_for_the_target_with_a_mesh_and_without(target, first_kernel):
    with mosaic.compiling_for(target):
        assert lowering()._infer_arch() == CHIPS[target].capability
    mesh = mesh_of(f"{target}-8x1", fsdp=8).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh), mosaic.compiling_for(target):
        assert jax.sharding.get_abstract_mesh() == mesh
        assert lowering()._infer_arch() == CHIPS[target].capability
    assert first_kernel == {"kernel": CHIPS[target].capability}


def test_a_program_traced_for_another_gpu_than_the_first_kernel_is_not_lowered(first_kernel):
    with mosaic.compiling_for("h100"):
        lowering()._infer_arch()
    with (
        mosaic.compiling_for("b200"),
        pytest.raises(RequestError, match=r"kernels for compute capability 9\.0, and can for no"),
    ):
        lowering()._infer_arch()
    assert first_kernel == {"kernel": (9, 0)}


def test_of_other_gpus_jax_says_what_it_always_said():
    assert mosaic._taught()
    kind = AbstractDevice(device_kind="NVIDIA RTX", num_cores=1, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=kind)):
        assert lowering()._infer_arch() == lowering()._infer_arch.args[0]()


def test_tokamax_is_told_of_the_target_and_of_this_machine_again():
    utils = mosaic.tokamax.module("gpu_utils")
    for target in ("h200", "b200"):
        with mosaic.compiling_for(target):
            assert (utils.is_sm90(), utils.is_sm100()) == (target == "h200", target == "b200")
            assert utils.has_mosaic_gpu_support()
    assert (utils.is_sm90(), utils.is_sm100()) == (False, False)


def test_what_it_cannot_compile_for_is_refused(first_kernel):
    assert [mosaic.refusal(t) for t in ("h100", "h200", "b200")] == [None] * 3
    assert "a100 is neither" in mosaic.refusal("a100")
    first_kernel["kernel"] = (9, 0)
    assert mosaic.refusal("h200") is None
    assert "compute capability 9.0, and can for no other" in mosaic.refusal("b200")
    first_kernel["kernel"] = (10, 0)
    assert mosaic.refusal("b200") is None
    assert "compute capability 10.0, and can for no other" in mosaic.refusal("h100")


def test_a_jax_that_asks_in_another_way_compiles_for_hopper_only(monkeypatch):
    monkeypatch.setattr(compat, "MOSAIC", ("axlearn_core.errors", "axlearn_core.none"))
    monkeypatch.setattr(mosaic, "_taught", mosaic._taught.__wrapped__)
    assert mosaic.refusal("h100") is None
    assert "takes every GPU for a Hopper, and b200 is none" in mosaic.refusal("b200")
