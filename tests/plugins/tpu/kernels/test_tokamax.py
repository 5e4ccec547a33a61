"""tokamax's grouped matmuls: compared with the XLA reference in Pallas' interpreter, and compiled for abstract TPUs."""

import functools

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from axlearn_core.compose.devices import topology_devices
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels.selection import Selection, use
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_tpu.kernels import tokamax
from axlearn_plugins_tpu.kernels.blocks import GROUPED
from axlearn_testing import Case, KernelSuite
from support import op_cases
from support.needs import require
from support.tpu_programs import GENERATIONS, compiled, not_only

NAME = "tokamax-mosaic-tpu"
SUPPORTED = [g for g in GENERATIONS if g != "tpu-v4-8"]


def by_tokamax(*operands):
    return GroupedMatmulOp(*operands).run(NAME)


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def interpreted(monkeypatch):
    """Run kernels in the interpreter with TPU memories, initialized with NaN, and with several tiles in each dimension."""
    with tokamax._kernels() as kernels:
        for name in ("gmm", "tgmm"):
            run = functools.partial(getattr(kernels, name), interpret=pallas_tpu.InterpretParams())
            monkeypatch.setattr(kernels, name, run)
    small = attrs.evolve(GROUPED["tpu-v5e"], rows=128, inner=512, outer=256)
    monkeypatch.setitem(GROUPED, "tpu-v5e", small)


def product(rows, inner, outer, sizes, dtype):
    return Case(
        name=f"{rows}x{inner}x{outer}-{dtype}",
        run=op_cases.grouped,
        operands=(
            op_cases.normal(rows, inner, dtype=dtype),
            op_cases.normal(len(sizes), inner, outer, dtype=dtype),
            jnp.asarray(sizes, jnp.int32),
        ),
        tolerance=op_cases.TOLERANCE[dtype],
    )


@pytest.mark.usefixtures("interpreted")
class Interpreted(KernelSuite):
    op, name = GroupedMatmulOp, NAME

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())

    def _only(self, *implementations):
        return use(Selection(target="tpu-v5e", declared=lambda op: implementations))


@pytest.mark.slow_cases("test_values_and_gradients_match_reference[200x384x128-float32]")
class TestGroupedProducts(Interpreted):
    """With 384 elements, the second tile is half as wide as the first. A group ends within a tile of rows; one is empty."""

    cases = (product(200, 384, 128, [90, 0, 100], "float32"), product(128, 128, 64, [0, 8, 120], "bfloat16"))


@pytest.mark.slow
class TestGroupedProductsOnTheOtherCases(Interpreted):
    cases = (
        product(128, 128, 128, [0, 8, 120], "bfloat16"),
        product(200, 384, 384, [90, 0, 100], "float32"),
        product(384, 768, 256, [0, 130, 0, 126, 0], "float32"),
        product(130, 128, 384, [0, 0], "float32"),
    )


def call(inner=256, outer=512, dtype="bfloat16", other="bfloat16", target="tpu-v5e"):
    shapes = (((64, inner), dtype), ((4, inner, outer), other), ((4,), "int32"))
    op = GroupedMatmulOp(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    return op, KernelContext(platform="tpu", target=target)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"dtype": "float32", "other": "float32"}, None),
        ({"target": ""}, None),
        ({"dtype": "float32"}, "got bfloat16, float32"),
        ({"dtype": "float16", "other": "float16"}, "all operands must have the same dtype, bfloat16 or float32"),
        ({"inner": 64}, "the dimension 64 is not a multiple of 128"),
        ({"outer": 192}, "the dimension 192 is not a multiple of 128"),
        ({"target": "tpu-v4"}, "not v4"),
    ],
)
def test_it_says_what_it_cannot_do(options, reason):
    answer = tokamax.MOSAIC.supports(*call(**options))
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("version", [None, "0.0.17"])
def test_without_the_library_the_reason_says_what_to_install(monkeypatch, version):
    def no_module(name):
        if version is None:
            raise tokamax.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(tokamax.metadata, "version", no_module)
    reason = tokamax.MOSAIC.supports(*call())
    assert "pip install 'axlearn-plugins-tpu[kernels]'" in reason
    assert version is None or version in reason


def test_unless_it_is_named_megablox_is_before_it():
    kernel_selection = Selection(platform="tpu", target="tpu-v5e")
    kernel_selection.choose(call()[0])
    kernel_selection.choose(call()[0], NAME)
    assert [c.name for c in kernel_selection.choices] == ["megablox", NAME]


@pytest.mark.slow
@pytest.mark.parametrize("generation", not_only("tpu-v5e-4", SUPPORTED))
def test_it_compiles_forward_and_backward(generation):
    lhs, rhs, sizes = ((300, 256), "bfloat16"), ((3, 256, 512), "bfloat16"), ((3,), "int32")
    program, names = compiled(generation, by_tokamax, lhs, rhs, sizes)
    assert names == [NAME]
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3  # the product and both gradients


@pytest.mark.slow
@pytest.mark.parametrize("generation", SUPPORTED)
def test_the_largest_tiles_compile_for_their_generation(generation):
    for dtype, inner, outer in (("bfloat16", 2048, 2048), ("float32", 1664, 2176)):
        lhs, rhs, sizes = ((4096, inner), dtype), ((8, inner, outer), dtype), ((8,), "int32")
        assert compiled(generation, by_tokamax, lhs, rhs, sizes)[1] == [NAME]


@pytest.mark.slow
def test_it_compiles_where_devices_have_matrices_of_their_own():
    """As in a layer, the chip is that of the mesh."""
    require("libtpu")
    machine = find_machine("tpu-v5e-4")
    mesh = jax.make_mesh((4,), ("expert",), devices=topology_devices(machine), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("expert")
    place = jax.sharding.NamedSharding(mesh, part)
    shapes = ((1024, 256), "bfloat16"), ((8, 256, 512), "bfloat16"), ((8,), "int32")
    abstract = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in shapes]
    run = jax.shard_map(by_tokamax, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)

    def loss(*operands):
        return jnp.sum(run(*operands).astype(jnp.float32) ** 2)

    with use(Selection(platform="tpu", target="tpu-v5e")) as choices:
        jax.jit(jax.grad(loss, (0, 1))).trace(*abstract).lower(lowering_platforms=("tpu",)).compile()
    assert [c.name for c in choices.choices] == [NAME]


@pytest.mark.slow_cases("")
@pytest.mark.parametrize("target", sorted(GROUPED))
def test_the_tiles_are_those_of_the_target(target, monkeypatch):
    tiles = []
    monkeypatch.setattr(tokamax, "_product", lambda lhs, rhs, sizes, tiling: tiles.append(tiling) or lhs)
    with use(Selection(platform="tpu", target=target)):
        for dtype in ("bfloat16", "float32"):
            x = jnp.ones((4096, 4096), dtype)
            jax.eval_shape(lambda x: tokamax.MOSAIC(GroupedMatmulOp(x, x[None], jnp.asarray([4096]))), x)
    tile = GROUPED[target]
    assert tiles == [(tile.rows, tile.inner // n, tile.outer) for n in (1, 2)]
