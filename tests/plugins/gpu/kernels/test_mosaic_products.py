"""Grouped matmuls and gated units in Mosaic GPU: supported calls, compilation, and the code around the kernels.

The kernels themselves cannot be interpreted. Tests of numbers use the same product in JAX instead.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.gated_linear_unit import MOSAIC as GATED
from axlearn_plugins_gpu.kernels.grouped_matmul import MOSAIC
from axlearn_plugins_gpu.kernels.grouped_matmul import TRITON as OTHER
from axlearn_plugins_gpu.kernels.tokamax import LATER
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS, GatedLinearUnitOp
from axlearn_testing import Case
from support import op_cases
from support.gpu_programs import Interpreted, Program, arrays, compiled, compiled_alone, kernel_calls

slow = pytest.mark.slow


def product(rows=64, groups=4, inner=256, outer=512, lhs="bfloat16", rhs="bfloat16", target="h100"):
    (lhs,), (rhs,) = arrays(lhs, (rows, inner)), arrays(rhs, (groups, inner, outer))
    op = GroupedMatmulOp(lhs, rhs, *arrays("int32", (groups,)))
    return op, KernelContext(platform="gpu", target=target)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"target": "b200"}, None),
        ({"target": "b200", "groups": 128}, None),
        ({"groups": 33}, None if LATER else "up to 32 groups on h100, not 33"),
        ({"rows": 60}, "number of rows, 60, is not a multiple of 8"),
        ({"outer": 192}, "dimension 192 is not a multiple of 128"),
        ({"inner": 384}, None),
        ({"inner": 384, "target": "b200"}, "dimension 384 is not a multiple of 256"),
        ({"lhs": "float32"}, "bfloat16 and float16, not float32"),
        ({"rhs": "float16"}, "needs one dtype, got bfloat16, float16"),
        ({"target": "a100"}, "a100 is neither"),
        ({"target": "rtx"}, "is not known to run on"),
    ],
)
def test_a_grouped_product_reports_unsupported_calls(library, first_kernel, options, reason):
    answer = MOSAIC.supports(*product(**options))
    assert answer is None if reason is None else reason in answer


def test_it_stands_behind_triton(library, first_kernel):
    assert OTHER.supports(*product(target="b200")) is None
    for target in ("h100", "b200"):
        choices = selection.Selection(platform="gpu", target=target)
        choices.choose(product(target=target)[0])
        choices.choose(product(target=target)[0], "tokamax-mosaic")
        assert [c.name for c in choices.choices] == ["tokamax-triton", "tokamax-mosaic"]
    first_kernel["kernel"] = (9, 0)
    assert "start a new process" in MOSAIC.supports(*product(target="b200"))


def unit(dims=(2, 64, 64), hidden=64, target="b200", activation="silu"):
    operands = arrays("bfloat16", dims, *((dims[-1], hidden),) * 2)
    op = GatedLinearUnitOp(*operands, hidden_dim=hidden, activation=activation)
    return op, KernelContext(platform="gpu", target=target)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        (
            {"target": "h100"},
            "hidden size on a device, 64, is not a multiple of 128"
            if LATER
            else "no kernel for h100 that is known to compile",
        ),
        ({"target": "h100", "hidden": 128}, None if LATER else "no kernel for h100 that is known to compile"),
        ({"target": "a100"}, "no kernel for a100 that is known to compile"),
        ({"activation": "gelu"}, "error function"),
        ({"dims": (2, 32, 64)}, "number of rows on a device, 64, is not a multiple of 128"),
        ({"dims": (2, 64, 96)}, "width on a device, 96, is not a multiple of 64"),
        ({"hidden": 96}, "hidden size on a device, 96, is not a multiple of 64"),
    ],
)
def test_a_gated_unit_reports_unsupported_calls(library, first_kernel, options, reason):
    answer = GATED.supports(*unit(**options))
    assert answer is None if reason is None else reason in answer


class Grouped:
    """What tokamax's kernels guarantee: rows after the last group are arbitrary, and sums over rows multiply them with 0."""

    def __init__(self, config):
        self.config = config

    def __call__(self, lhs, rhs, *, group_sizes, ragged_dot_dimension_numbers):
        base = tokamax.module("ops.ragged_dot.base")
        ends = jnp.cumsum(group_sizes)
        row = jnp.arange(lhs.shape[0])
        in_group = (row[:, None] < ends) & (row[:, None] >= ends - group_sizes)
        if ragged_dot_dimension_numbers == base.RAGGED_CONTRACTING_DOT_DIM_NUMS:
            actual = jnp.einsum("mg,mk,mn->gkn", in_group.astype(lhs.dtype), lhs, rhs)
        else:
            if ragged_dot_dimension_numbers == base.TRANS_RHS_RAGGED_DOT_DIM_NUMS:
                rhs = rhs.mT
            actual = jnp.einsum(
                "mg,mk,gkn->mn", in_group.astype(lhs.dtype), jnp.where(in_group.any(1)[:, None], lhs, 0), rhs
            )
            actual = jnp.where(in_group.any(1)[:, None], actual, jnp.nan)
        return actual.astype(lhs.dtype)


class Careful(Grouped):
    """Like Triton's kernel, which excludes these rows from sums."""

    def __call__(self, lhs, rhs, *, group_sizes, ragged_dot_dimension_numbers):
        inside = (jnp.arange(lhs.shape[0]) < jnp.sum(group_sizes))[:, None]
        if rhs.ndim == 2:
            lhs, rhs = jnp.where(inside, lhs, 0), jnp.where(inside, rhs, 0)
        return super().__call__(
            lhs, rhs, group_sizes=group_sizes, ragged_dot_dimension_numbers=ragged_dot_dimension_numbers
        )


@pytest.mark.parametrize(("inner", "outer"), [(256, 192), (200, 128), (100, 250)])
def test_triton_pads_matrices_of_other_sizes(library, monkeypatch, inner, outer):
    """Padding changes neither results nor gradients."""
    shapes = []

    class Multiples(Careful):
        def __call__(self, lhs, rhs, **options):
            shapes.extend([*lhs.shape[1:], *rhs.shape[1:]])
            return super().__call__(lhs, rhs, **options)

    monkeypatch.setattr(tokamax.module("ops.ragged_dot.pallas_triton"), "PallasTritonRaggedDot", Multiples)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, inner)), jnp.bfloat16)
    matrices = jnp.asarray(rng.normal(size=(3, inner, outer)) / 16, jnp.bfloat16)
    sizes = jnp.asarray([30, 0, 21], jnp.int32)

    def run(kernel):
        def loss(x, matrices):
            out = GroupedMatmulOp(x, matrices, sizes).run(kernel)[:51]
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.value_and_grad(loss, argnums=(0, 1))(x, matrices)

    expected = run("xla")
    with selection.use(selection.Selection(target="h100", platform="gpu")) as choices:
        actual = run("tokamax-triton")
    assert [c.name for c in choices.choices] == ["tokamax-triton"]
    assert not any(size % 128 for size in shapes)
    assert len(shapes) == 3 + 3 + 2  # forward, and the gradients of the rows and of the matrices
    (value, (rows, by_group)), (expected_value, (expected_rows, expected_by_group)) = actual, expected
    np.testing.assert_allclose(value, expected_value, rtol=0.02)
    np.testing.assert_allclose(np.float32(rows[:51]), np.float32(expected_rows[:51]), atol=0.05)
    np.testing.assert_allclose(np.float32(by_group), np.float32(expected_by_group), atol=0.05)


@pytest.mark.fast_cases("b200-248")
@pytest.mark.parametrize("rows", [256, 248])  # on Hopper, Mosaic or Triton computes the gradient of the matrices
@pytest.mark.parametrize("target", ["h100", "b200"])
def test_a_network_of_grouped_products_has_the_reference_gradients(library, first_kernel, monkeypatch, target, rows):
    used = []
    for module, name, stand_in in (
        ("pallas_mosaic_gpu", "PallasMosaicGpuRaggedDot", Grouped),
        ("pallas_triton", "PallasTritonRaggedDot", Careful),
    ):

        def network(config, stand_in=stand_in, name=name):
            used.append(name)
            return stand_in(config)

        monkeypatch.setattr(tokamax.module(f"ops.ragged_dot.{module}"), name, network)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 256)), jnp.bfloat16)
    first, second = (jnp.asarray(rng.normal(size=(3, 256, 256)) / 16, jnp.bfloat16) for _ in range(2))
    sizes = jnp.asarray([70, 0, 111], jnp.int32)

    def loss(kernel, x, first, second):
        hidden = jnp.tanh(GroupedMatmulOp(x, first, sizes).run(kernel))
        out = GroupedMatmulOp(hidden, second, sizes).run(kernel)
        out = jnp.where((jnp.arange(rows) < 181)[:, None], out, 0)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = jax.grad(loss, argnums=(2, 3))
    expected = gradients("xla", x, first, second)
    with selection.use(selection.Selection(target=target, platform="gpu")) as choices:
        got = gradients("tokamax-mosaic", x, first, second)
    assert [c.name for c in choices.choices] == ["tokamax-mosaic"]
    outer = set() if (target, rows) == ("h100", 256) else {"PallasTritonRaggedDot"}
    assert set(used) == {"PallasMosaicGpuRaggedDot"} | outer
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 3e-2 * np.linalg.norm(b)


@pytest.fixture
def in_jax(library, first_kernel, monkeypatch):
    """Replace the kernel of gated units with tokamax's XLA implementation."""
    kernels, base = (tokamax.module(f"ops.gated_linear_unit.{m}") for m in ("pallas_mosaic_gpu", "base"))
    monkeypatch.setattr(kernels, "PallasMosaicGpuGatedLinearUnit", lambda config: base.GatedLinearUnit())


def gated_cases():
    for activation in (a for a in ACTIVATIONS if a != "gelu"):
        operands = [
            op_cases.normal(2, 64, 64, dtype="bfloat16"),
            *(op_cases.normal(64, 128, dtype="bfloat16") / 8 for _ in "gu"),
        ]

        def run(kernel, x, gate, up, activation=activation):
            return op_cases.gated(kernel, x, gate, up, activation=activation)

        yield Case(name=activation, run=run, operands=tuple(operands), tolerance=3e-2)


@pytest.mark.slow_cases(
    "test_values_and_gradients_match_reference[gelu_tanh]",
    "test_values_and_gradients_match_reference[silu]",
)
@pytest.mark.usefixtures("in_jax")
class TestGated(Interpreted):
    op = GatedLinearUnitOp
    name = "tokamax-mosaic"
    target = "b200"
    cases = tuple(gated_cases())


def grouped(lhs, rhs, sizes):
    return jnp.sin(GroupedMatmulOp(lhs, rhs, sizes).run("tokamax-mosaic"))


def gated(x, gate, up, activation="silu"):
    return jnp.sin(op_cases.gated("tokamax-mosaic", x, gate, up, activation=activation))


def products(rows=512, inner=256, outer=512, groups=4, dtype="bfloat16"):
    return [((rows, inner), dtype), ((groups, inner, outer), dtype), ((groups,), "int32")]


def units(rows=64, inner=256, outer=512, dtype="bfloat16"):
    return [((2, rows, inner), dtype), ((inner, outer), dtype), ((inner, outer), dtype)]


@pytest.mark.fast_cases("False-h100")
@pytest.mark.parametrize("target", ["h100", pytest.param("h200", marks=slow)])
@pytest.mark.parametrize("gradients", [False, True])
def test_grouped_products_compile_for_hopper(library, target, gradients):
    text, choices = compiled(grouped, f"{target}-1x1", *products(), gradients=gradients)
    assert choices == ["tokamax-mosaic"]
    assert kernel_calls(text) == ((3, 0) if gradients else (1, 0))


@slow
@pytest.mark.parametrize(
    ("sizes", "backward"),
    [
        ({"rows": 8, "inner": 128, "outer": 384, "groups": 128 if LATER else 32}, (2, 1)),
        ({"rows": 504, "dtype": "float16"}, (2, 1)),
        ({"rows": 64, "outer": 128}, (3, 0)),
    ],
)
def test_grouped_products_of_all_sizes_compile_for_hopper(library, sizes, backward):
    for gradients, calls in ((False, (1, 0)), (True, backward)):
        text, choices = compiled(grouped, "h100-1x1", *products(**sizes), gradients=gradients)
        assert (choices, kernel_calls(text)) == (["tokamax-mosaic"], calls)


def local_program(function, *args, **options):
    return Program(f"{__name__}:{function.__name__}", options.pop("options", {}), *args, **options)


def check(texts, mosaic, triton):
    assert (texts.mosaic, texts.triton, texts.chosen) == (mosaic, triton, ["tokamax-mosaic"])
    assert texts.architectures == {"sm_100a"}
    assert "tcgen05.mma" in texts.ptx
    assert "wgmma" not in texts.ptx


@slow
@pytest.mark.skipif(not LATER, reason="needs tokamax 0.0.14 (Python 3.12 or later); 0.0.12's kernel does not compile")
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_a_gated_unit_compiles_for_hopper(library, target):
    text, choices = compiled(gated, f"{target}-1x1", *units())
    assert (choices, kernel_calls(text)) == (["tokamax-mosaic"], (1, 0))


@slow
def test_a_gated_unit_compiles_for_blackwell(library):
    (actual,) = compiled_alone("b200-1x1", local_program(gated, units()))
    check(actual, 1, 0)


@slow
def test_products_of_all_sizes_compile_for_blackwell_forward_and_backward(library):
    sizes = ({}, {"rows": 8, "outer": 256, "groups": 128}, {"rows": 504, "dtype": "float16"})
    for actual in compiled_alone("b200-1x1", *(local_program(grouped, products(**s), gradients=True) for s in sizes)):
        check(actual, 2, 1)
    programs = [local_program(gated, units(), options={"activation": a}) for a in ACTIVATIONS if a != "gelu"]
    programs += [
        local_program(gated, units(inner=64, outer=64, dtype="float16")),
        local_program(gated, units(inner=128), gradients=True),
    ]
    for actual in compiled_alone("b200-8x1", *programs):
        check(actual, 1, 0)
