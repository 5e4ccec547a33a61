"""Kernels of tokamax: supported calls, and compilation for every GPU."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.contracts.mesh import DEFAULT_RULES, Mesh
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import Selection
from axlearn_core.nn.sharding import logical_rules
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.hooks import axlearn_kernels
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import (
    GATED_MOSAIC_LATER,
    GROUPED,
    GROUPED_MOSAIC,
    MAX_WIDTH,
    gated_blocks,
    grouped_blocks,
    norm_blocks,
)
from axlearn_plugins_gpu.kernels.gated_linear_unit import TRITON as GATED
from axlearn_plugins_gpu.kernels.grouped_matmul import TRITON
from axlearn_plugins_gpu.kernels.rms_norm import TRITON as NORM
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_transformer.kernels.gated_linear_unit import GatedLinearUnitOp
from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp
from support import op_cases
from support.gpu_programs import Interpreted, arrays, compiled, kernel_calls

TARGETS = ["h100", *(pytest.param(t, marks=pytest.mark.slow) for t in ("a100", "h200", "b200"))]


def product(inner=256, outer=512, dtype="bfloat16", target="h100"):
    op = GroupedMatmulOp(*arrays(dtype, (64, inner), (4, inner, outer)), *arrays("int32", (4,)))
    return op, KernelContext(platform="gpu", target=target)


def test_every_block_size_is_that_of_a_gpu_and_fits_its_shared_memory():
    assert {chip.capability for chip in CHIPS.values()} == set(GROUPED)
    for name, chip in CHIPS.items():
        assert grouped_blocks(name) is GROUPED[chip.capability]
        assert grouped_blocks(name).shared <= chip.shared - 1024
        for pipelined in (table.get(chip.capability) for table in (GROUPED_MOSAIC, GATED_MOSAIC_LATER)):
            assert pipelined is None or pipelined.shared <= chip.shared - 1024
    assert {chip.capability for chip in CHIPS.values()} >= {*GROUPED_MOSAIC, *GATED_MOSAIC_LATER}


def test_it_says_what_it_cannot_do(library):
    assert TRITON.supports(*product()) is None
    assert "float32" in TRITON.supports(*product(dtype="float32"))
    assert TRITON.supports(*product(outer=192)) is None
    assert "64 is not a multiple of 128, and padding" in TRITON.supports(*product(outer=64))
    assert "is not known to run on" in TRITON.supports(*product(target="rtx"))


@pytest.mark.parametrize("version", [None, "0.0.17"])
def test_without_the_library_the_reason_says_what_to_install(monkeypatch, version):
    def no_module(name):
        if version is None:
            raise tokamax.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(tokamax.metadata, "version", no_module)
    choices = Selection(platform="gpu", target="h100")
    choices.choose(product()[0])
    assert choices.choices[0].name != "tokamax-triton"
    reason = choices.choices[0].rejected["tokamax-triton"]
    assert "axlearn-plugins-gpu[kernels]" in reason
    assert version is None or version in reason


@pytest.mark.slow_cases("h100")
@pytest.mark.parametrize("target", TARGETS)
def test_grouped_products_compile_forward_and_backward(library, target):
    shapes = [((512, 256), jnp.bfloat16), ((4, 256, 512), jnp.bfloat16), ((4,), jnp.int32)]

    def run(*operands):
        return GroupedMatmulOp(*operands).run("tokamax-triton")

    for gradients, kernels in ((False, 1), (True, 2)):  # the gradients do not need the forward result
        text, choices = compiled(run, f"{target}-1x1", *shapes, gradients=gradients)
        assert choices == ["tokamax-triton"]
        assert kernel_calls(text) == (0, kernels)


def declared(op):
    """Return the plugin's kernels of an op, for all platforms."""
    return [attrs.evolve(k, platforms=()) for k in axlearn_kernels() if k.op == op.path()]


@pytest.mark.slow_cases(
    "test_values_and_gradients_match_reference[2x16x24-offset1.0-float32]",
    "test_values_and_gradients_match_reference[2x16x32-offset1.0-bfloat16]",
    "test_values_and_gradients_match_reference[2x16x4x8-offset0.0-float32]",
)
class TestNorm(Interpreted):
    op = RMSNormOp
    cases = tuple(op_cases.CASES[RMSNormOp])


QUICK = ("silu-64-bfloat16", "silu-64-float32", "relu_squared-64-bfloat16", "silu-80")


@pytest.mark.slow_cases("test_values_and_gradients_match_reference[silu-64-bfloat16]")
class TestGated(Interpreted):
    op = GatedLinearUnitOp
    cases = tuple(c for c in op_cases.CASES[GatedLinearUnitOp] if c.name.startswith(QUICK))


@pytest.mark.slow
class TestGatedOnTheOtherCases(Interpreted):
    op = GatedLinearUnitOp
    cases = tuple(c for c in op_cases.CASES[GatedLinearUnitOp] if not c.name.startswith(QUICK))


def rows(dims, dtype="bfloat16", target="h100"):
    op = RMSNormOp(*arrays(dtype, dims, dims[-1:]), eps=1e-5)
    return op, KernelContext(platform="gpu", target=target)


def test_norm_reports_unsupported_calls(library):
    assert NORM.supports(*rows((2, 8, MAX_WIDTH))) is None
    assert "16385 elements is longer than 16384" in NORM.supports(*rows((2, 8, MAX_WIDTH + 1)))
    assert "2 to 4 dimensions, not 5" in NORM.supports(*rows((2, 2, 2, 2, 8)))
    assert "float64" in NORM.supports(*rows((2, 8, 64), "float64"))
    assert "is not known to run on" in NORM.supports(*rows((2, 8, 64), target="rtx"))


def unit(dims=(2, 16, 32), hidden=64, dtype="bfloat16", plain=True, activation="silu"):
    x, gate, up = arrays(dtype, dims, *((dims[-1], hidden),) * 2)
    matrices = (gate, up) if plain else (gate, None)
    op = GatedLinearUnitOp(x, *matrices, hidden_dim=hidden, activation=activation)
    return op, KernelContext(platform="gpu", target="h100")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"plain": False}, "an adapter, a bias, quantization"),
        ({"dtype": "float32"}, "bfloat16 or float16, got float32"),
        ({"activation": "gelu"}, "error function"),
        ({"hidden": 80}, "hidden size on a device, 80, is not a multiple of 32"),
        ({"dims": (2, 16, 40)}, "width on a device, 40, is not a multiple of 32"),
        ({"dims": (1, 16, 32)}, "number of rows on a device, 16, is not a multiple of 32"),
    ],
)
def test_a_gated_unit_reports_unsupported_calls(library, options, reason):
    answer = GATED.supports(*unit(**options))
    assert answer is None if reason is None else reason in answer


def test_what_a_device_has_decides(library):
    with logical_rules(make_mesh(Mesh(shape={"fsdp": 2, "tensor": 4})), DEFAULT_RULES):
        assert "rows on a device, 16" in GATED.supports(*unit((2, 16, 32), 128))
        assert "hidden size on a device, 16" in GATED.supports(*unit((2, 32, 32), 64))
        assert GATED.supports(*unit((2, 32, 32), 128)) is None


@pytest.mark.slow
def test_devices_compute_their_own_rows_and_columns(interpreted):
    rng = np.random.default_rng(0)
    x, weight, gate, up = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 32, 64), (64,), (64, 128), (64, 128))
    )

    def loss(kernel, x, weight, gate, up):
        y = op_cases.gated(kernel, RMSNormOp(x, weight, eps=1e-5).run(kernel), gate / 8, up / 8)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    measured = jax.grad(loss, argnums=(1, 2, 3, 4))
    expected = measured("xla", x, weight, gate, up)
    with (
        selection.use(Selection(target="h100", declared=declared)) as result,
        logical_rules(make_mesh(Mesh(shape={"fsdp": 2, "tensor": 4})), DEFAULT_RULES),
    ):
        got = jax.jit(measured, static_argnums=0)(None, x, weight, gate, up)
    assert [c.name for c in result.choices] == ["tokamax-triton"] * 2
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 3e-2 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_norms_and_gated_units_compile_forward_and_backward(library, target):
    def run(x, weight, gate, up):
        y = RMSNormOp(x, weight, eps=1e-5).run("tokamax-triton")
        return op_cases.gated("tokamax-triton", y, gate, up)

    shapes = [(s, jnp.bfloat16) for s in ((4, 128, 256), (256,), (256, 512), (256, 512))]
    for gradients, kernels in ((False, 2), (True, 3)):  # XLA computes the backward pass of the gated unit
        text, choices = compiled(run, f"{target}-1x1", *shapes, gradients=gradients)
        assert choices == ["tokamax-triton"] * 2
        assert kernel_calls(text) == (0, kernels)


def test_blocks_of_rows_fit_their_registers_and_occupy_the_gpu():
    for target, chip in CHIPS.items():
        for width in (64, 4096, 12345, MAX_WIDTH):
            actual = norm_blocks(target, 1 << 20, width, 1024)
            assert actual.rows == 1 or actual.rows * width <= MAX_WIDTH
            assert actual.warps in (1, 2, 4)
        assert norm_blocks(target, 256, 64, 1024).rows == 1  # more blocks are better than large ones
        assert gated_blocks(target, 8192, 8192).m == 128
        assert (256 // gated_blocks(target, 256, 1024).m) * 16 >= 64
        assert gated_blocks(target, 8192, 8192).shared <= chip.shared - 1024
