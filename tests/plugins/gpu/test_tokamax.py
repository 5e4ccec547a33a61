"""Kernels of tokamax: which calls they take, and that they compile for every GPU."""

import jax.numpy as jnp
import pytest
from gpu_programs import compiled

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels.selection import Selection
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import GROUPED, grouped
from axlearn_plugins_gpu.kernels.grouped_matmul import TRITON
from axlearn_plugins_moe.grouped_matmul import grouped_matmul

TARGETS = ["h100", *(pytest.param(t, marks=pytest.mark.slow) for t in ("a100", "h200", "b200"))]


@pytest.fixture
def library():
    if reason := tokamax.missing():
        pytest.skip(reason)


def request(inner=256, outer=512, dtype="bfloat16", target="h100"):
    return OpRequest(
        op="grouped_matmul",
        platform="gpu",
        target=target,
        shapes={"lhs": (64, inner), "rhs": (4, inner, outer)},
        dtypes={"lhs": dtype, "rhs": dtype},
        options={},
        gradients=True,
    )


def test_every_block_size_is_that_of_a_gpu_and_fits_its_shared_memory():
    assert {chip.capability for chip in CHIPS.values()} == set(GROUPED)
    for name, chip in CHIPS.items():
        assert grouped(name) is GROUPED[chip.capability]
        assert grouped(name).shared <= chip.shared - 1024


def test_it_says_what_it_cannot_do(library):
    assert TRITON.supports(request()) is None
    assert "float32" in TRITON.supports(request(dtype="float32"))
    assert "192 is no multiple of 128" in TRITON.supports(request(outer=192))
    assert "is none that it is known" in TRITON.supports(request(target="rtx"))


@pytest.mark.parametrize("version", [None, "0.0.17"])
def test_without_the_library_the_reason_says_what_to_install(monkeypatch, version):
    def found(name):
        if version is None:
            raise tokamax.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(tokamax.metadata, "version", found)
    chosen = Selection(platform="gpu", target="h100")
    chosen.choose(request())
    assert chosen.choices[0].name != "tokamax-triton"
    reason = chosen.choices[0].rejected["tokamax-triton"]
    assert "axlearn-plugins-gpu[kernels]" in reason
    assert version is None or version in reason


@pytest.mark.parametrize("target", TARGETS)
def test_grouped_products_compile_forward_and_backward(library, target):
    shapes = [((512, 256), jnp.bfloat16), ((4, 256, 512), jnp.bfloat16), ((4,), jnp.int32)]
    for gradients, kernels in ((False, 1), (True, 2)):  # the gradients need no result of the forward pass
        text, chosen = compiled(grouped_matmul, f"{target}-1x1", *shapes, gradients=gradients)
        assert chosen == ["tokamax-triton"]
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == kernels
