"""TPU kernels: compared with the XLA reference in Pallas' interpreter, and compiled for abstract TPUs."""

import contextlib
import functools

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import literals
from jax.experimental import pallas

from axlearn_core.compose.devices import topology_devices
from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.contracts.mesh import DEFAULT_RULES, Mesh
from axlearn_core.kernels import selection
from axlearn_core.nn.sharding import logical_rules
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_tpu.generations import TARGETS
from axlearn_plugins_tpu.hooks import KERNELS
from axlearn_plugins_tpu.kernels import megablox, ragged_paged, splash
from axlearn_plugins_tpu.kernels.blocks import (
    GROUPED,
    LANES,
    PAGED,
    SPLASH,
    PagedBlocks,
    SplashBlocks,
    largest_divisor,
    shrink_blocks,
)
from axlearn_plugins_tpu.kernels.chip import use_target_chip
from axlearn_plugins_tpu.kernels.ragged_paged import RAGGED_PAGED
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Prefix, Segments, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp
from axlearn_testing import Case, KernelSuite
from support import op_cases
from support.needs import require
from support.tpu_programs import GENERATIONS, compiled, not_only

SMALL = SplashBlocks(
    query=128,
    key=256,
    key_compute=128,
    backward_query=128,
    backward_key=128,
    backward_key_compute=128,
    max_fused_blocks=1,
)


@pytest.fixture
def interpreted(monkeypatch):
    """Run both kernels in Pallas' interpreter, with several blocks of splash attention in each dimension."""
    make, product = splash.splash.make_splash_mha, megablox.ops.gmm
    monkeypatch.setattr(splash.splash, "make_splash_mha", functools.partial(make, interpret=True))
    monkeypatch.setattr(megablox.ops, "gmm", lambda *a: product(*a, None, None, False, True))
    monkeypatch.setitem(SPLASH, "", SMALL)
    monkeypatch.setitem(GROUPED, "", attrs.evolve(GROUPED[""], inner=128, outer=128))


@pytest.mark.usefixtures("interpreted")
class Interpreted(KernelSuite):
    """Conformance tests of each kernel, in the interpreter."""

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())


@pytest.fixture
def simulated(monkeypatch):
    """Run kernels in Pallas' interpreter."""
    call = functools.partial(pallas.pallas_call, interpret=True)
    monkeypatch.setattr(pallas, "pallas_call", call)
    monkeypatch.setattr(
        literals.TypedInt, "shape", (), raising=False
    )  # the interpreter reads the shape of constant indices
    monkeypatch.setitem(PAGED, "", PagedBlocks(queries=8, keys=16))


@pytest.mark.slow_cases(
    "test_values_and_gradients_match_reference[capped-bfloat16]",
    "test_values_and_gradients_match_reference[mixed-float32]",
)
@pytest.mark.usefixtures("simulated")
class TestRaggedPaged(KernelSuite):
    op, name = PagedAttentionOp, "ragged-paged"
    cases = (
        op_cases.paged(
            "mixed", new=[1, 12, 1], lengths=[40, 20, 1], size=128, mask=Causal() & SlidingWindow(6), tokens=3
        ),
        op_cases.paged("capped", new=[9], lengths=[30], size=128, softcap=2.0, groups=1, dtype="bfloat16"),
        op_cases.paged("narrow", new=[1], lengths=[9]),
    )

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())


def paged_call(heads=8, groups=4, size=128, dtype="bfloat16", pages="bfloat16", table=(4, 8)):
    shapes = [((16, heads, size), dtype), ((32, 16, 2 * groups, size), pages)]
    shapes += [(shape, "int32") for shape in (table, table[:1], (table[0] + 1,), (1,))]
    op = PagedAttentionOp(*(jax.ShapeDtypeStruct(*s) for s in shapes), scale=0.1)
    return op, KernelContext(platform="tpu", target="tpu-v5e", gradients=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"dtype": "float16", "pages": "float16"}, "all operands must have the same dtype, bfloat16 or float32"),
        ({"pages": "float32"}, "got bfloat16, float32"),
        ({"size": 64}, "it needs head size 128, got 64"),
        ({"size": 256}, "it needs head size 128, got 256"),
        ({"table": (256, 1024)}, "the page table has 262144 entries"),
        ({"groups": 5, "heads": 10}, "5 key-value heads per device do not fill"),
    ],
)
def test_paged_attention_reports_unsupported_calls(options, reason):
    answer = RAGGED_PAGED.supports(*paged_call(**options))
    assert answer is None if reason is None else reason in answer


def test_paged_attention_splits_heads_that_can_be_split():
    with logical_rules(make_mesh(Mesh(shape={"fsdp": 2, "tensor": 4})), DEFAULT_RULES):
        assert RAGGED_PAGED.supports(*paged_call(groups=4)) is None
        assert "2 key-value heads cannot be split over 4 devices" in RAGGED_PAGED.supports(*paged_call(groups=2))


@pytest.mark.slow
def test_devices_read_the_pages_of_their_own_heads(simulated, monkeypatch):
    case = op_cases.paged("mixed", new=[3, 1], lengths=[20, 9], heads=8, groups=4, size=128)
    declared = [attrs.evolve(k, platforms=()) for k in KERNELS if k.op == PagedAttentionOp.path()]
    monkeypatch.setitem(PAGED, "tpu-v5e", PAGED[""])  # the small ones
    mesh = make_mesh(Mesh(shape={"fsdp": 2, "tensor": 4}))

    @jax.jit
    def sharded(*operands):
        kernel_selection = selection.Selection(target="tpu-v5e", declared=lambda op: declared)
        with selection.use(kernel_selection), logical_rules(mesh, DEFAULT_RULES):
            return case.run("ragged-paged", *operands)

    np.testing.assert_allclose(sharded(*case.operands), case.run("xla", *case.operands), rtol=2e-5, atol=2e-5)


QUICK = ("window", "prefix", "chunks", "decoding", "odd", "alibi")


@pytest.mark.slow_cases(
    "test_values_and_gradients_match_reference[chunks-256x256-4of2-float32]",
    "test_values_and_gradients_match_reference[prefix-256x256-4of2-float32]",
    "test_values_and_gradients_match_reference[window-256x256-4of2-float32]",
)
class TestSplash(Interpreted):
    op, name = AttentionOp, "splash"
    cases = tuple(c for c in op_cases.CASES[AttentionOp] if c.name.startswith(QUICK))


@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(3), Causal() & SlidingWindow(3), Causal() & SlidingWindow(16)]
)
def test_masks_of_splash_show_the_keys_of_ours(mask):
    static = splash.Structure.from_mask(mask).static(16)
    np.testing.assert_array_equal(static[slice(None), slice(None)], mask.materialize((0, 16), (0, 16))[0])


def test_splash_refuses_sinks_that_are_sharded_unlike_their_heads():
    shapes = (4, 128, 8, 64), (4, 128, 2, 64), (4, 128, 2, 64)
    query, key, value = (jnp.zeros(shape) for shape in shapes)
    op = AttentionOp(query=query, key=key, value=value, mask=Causal(), scale=0.125, sinks=jnp.zeros(8))
    mesh, context = make_mesh(Mesh(shape={"data": 2, "tensor": 4})), KernelContext(platform="tpu")
    with logical_rules(mesh, {"batch": ("data",), "activation_heads": ("tensor",)}):
        assert splash.SPLASH_ATTENTION.supports(op, context) is None
    with logical_rules(mesh, {"batch": ("data",), "activation_heads": ("tensor", "data")}):  # batches have taken `data`
        reason = splash.SPLASH_ATTENTION.supports(op, context)
    assert reason == "the sinks are sharded over tensor and data, but the heads over tensor"


@pytest.mark.slow
class TestSplashOnTheOtherCases(Interpreted):
    op, name = AttentionOp, "splash"
    cases = tuple(c for c in op_cases.CASES[AttentionOp] if not c.name.startswith(QUICK))


@pytest.mark.slow_cases("test_values_and_gradients_match_reference[300-float32]")
class TestMegablox(Interpreted):
    op, name = GroupedMatmulOp, "megablox"
    cases = tuple(
        Case(
            name=f"{rows}-{dtype}",
            run=op_cases.grouped,
            operands=(
                op_cases.normal(rows, 128, dtype=dtype),
                op_cases.normal(3, 128, width, dtype=dtype),
                jnp.asarray(sizes, jnp.int32),
            ),
            tolerance=op_cases.TOLERANCE[dtype],
        )
        for rows, width, sizes, dtype in ((300, 256, [100, 0, 150], "float32"), (128, 64, [0, 8, 120], "bfloat16"))
    )


@pytest.mark.fast_cases("shape1-2")
@pytest.mark.parametrize(("shape", "groups"), [({"data": 2, "tensor": 4}, 4), ({"fsdp": 2, "tensor": 4}, 2)])
def test_devices_attend_on_their_own_rows_and_heads(interpreted, shape, groups):
    """Also with fewer key-value heads than devices that share the heads."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 128, n, 8)), jnp.float32) for n in (4, groups, groups))
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (2, 128)), axis=1), jnp.int32)
    mesh = make_mesh(Mesh(shape=shape))

    def run(kernel, *operands):
        return AttentionOp(*operands, mask=Causal() & Segments(ids, ids), scale=0.3, sinks=op_cases.SINKS).run(kernel)

    declared = [attrs.evolve(k, platforms=()) for k in KERNELS if k.op == AttentionOp.path()]

    @jax.jit
    def sharded(*operands):
        with selection.use(selection.Selection(declared=lambda op: declared)), logical_rules(mesh, DEFAULT_RULES):
            return run("splash", *operands)

    np.testing.assert_allclose(sharded(query, key, value), run("xla", query, key, value), rtol=2e-5, atol=2e-5)


def attend(query, key, value, ids, prefix=None, sinks=None, window=None, softcap=None):
    mask = Causal() | Prefix(prefix) if prefix is not None else Causal()
    mask = mask if window is None else mask & SlidingWindow(window)
    mask = mask & Segments(ids, ids)
    return AttentionOp(query, key, value, mask=mask, scale=0.1, softcap=softcap, sinks=sinks).run()


def attended(generation, length, heads, groups, size, dtype, rows=1, **options):
    """Compile splash attention for a TPU generation."""
    shapes = [((rows, length, n, size), dtype) for n in (heads, groups, groups)] + [((rows, length), "int32")]
    if options.pop("prefix", False):
        shapes.append(((rows,), "int32"))
    program, names = compiled(generation, functools.partial(attend, **options), *shapes)
    assert names == ["splash"]
    return program


@pytest.mark.parametrize("generation", not_only("tpu-v5p-8", GENERATIONS))
def test_attention_compiles_for_every_generation(generation):
    attended(generation, 256, 2, 1, 128, "bfloat16", softcap=30.0)
    if generation != "tpu-v5p-8":
        attended(generation, 256, 2, 1, 64, "bfloat16", prefix=True)


def product(*operands):
    return GroupedMatmulOp(*operands).run()


@pytest.mark.slow_cases("tpu-v5p-8")
@pytest.mark.parametrize("generation", not_only("tpu-v5p-8", GENERATIONS))
def test_grouped_products_compile_for_every_generation(generation):
    lhs, rhs, sizes = ((300, 256), "bfloat16"), ((3, 256, 512), "bfloat16"), ((3,), "int32")
    assert compiled(generation, product, lhs, rhs, sizes)[1] == ["megablox"]


@pytest.mark.parametrize("generation", not_only("tpu-v5e-4", GENERATIONS))
def test_paged_attention_compiles_for_one_device_that_is_not_here(generation):
    """Pallas reads the chip, and the default device is a CPU."""
    shapes = ((8, 8, 128), "bfloat16"), ((64, 16, 4, 128), "bfloat16"), ((4, 16), "int32")
    numbers = [((n,), "int32") for n in (4, 5, 1)]

    def run(*operands):
        return PagedAttentionOp(*operands, scale=0.1).run()

    assert compiled(generation, run, *shapes, *numbers, gradients=False)[1] == ["ragged-paged"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_chip_that_kernels_ask_for_is_that_of_the_target(generation):
    require("libtpu")
    machine = find_machine(generation)
    device = topology_devices(machine)[0]

    def chip():
        device = jax.sharding.get_abstract_mesh().abstract_device
        return device and (device.device_kind, device.num_cores, device.platform)

    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    for target, outer, expected in (
        (machine.target.name, None, (device.device_kind, device.num_cores, "tpu")),
        (machine.target.name, mesh, (jax.devices()[0].device_kind, None, "cpu")),
        ("another", None, None),
    ):
        within = jax.sharding.use_abstract_mesh(outer.abstract_mesh) if outer else contextlib.nullcontext()
        with selection.use(selection.Selection(platform="tpu", target=target)), within, use_target_chip():
            assert chip() == expected
    assert chip() is None


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_paged_attention_compiles_for_every_generation(generation):
    require("libtpu")
    machine = find_machine(generation)
    devices = topology_devices(machine)
    mesh = jax.make_mesh((len(devices),), ("tensor",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))

    def run(*operands):
        with logical_rules(mesh, DEFAULT_RULES):
            return PagedAttentionOp(*operands, scale=0.1, mask=Causal() & SlidingWindow(512), softcap=30.0).run()

    for groups, slots, dtype in ((2, 16, "bfloat16"), (1, 64, "bfloat16"), (8, 16, "float32")):
        groups *= len(devices)
        shapes = ((64, 8 * groups, 128), dtype), ((512, slots, 2 * groups, 128), dtype), ((32, 64), "int32")
        numbers = [((n,), "int32") for n in (32, 33, 1)]
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        abstract = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in (*shapes, *numbers)]
        with selection.use(selection.Selection(platform="tpu", target=machine.target.name, gradients=False)) as choices:
            jax.jit(run).trace(*abstract).lower(lowering_platforms=("tpu",)).compile()
        assert [c.name for c in choices.choices] == ["ragged-paged"]


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_attention_with_sinks_compiles_for_every_generation(generation):
    def attend_with_sinks(query, key, value, sinks, ids):
        return attend(query, key, value, ids, sinks=sinks, window=128)

    shapes = [((1, 1024, n, 64), "bfloat16") for n in (8, 2, 2)] + [((8,), "float32"), ((1, 1024), "int32")]
    assert compiled(generation, attend_with_sinks, *shapes)[1] == ["splash"]


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(("length", "dtype"), [(4096, "bfloat16"), (8192, "float32")])
def test_the_largest_blocks_compile_for_their_generation(generation, length, dtype):
    attended(generation, length, 2, 1, 256, dtype, softcap=30.0)  # fused, and not


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_largest_tiles_compile_for_their_generation(generation):
    for dtype in ("bfloat16", "float32"):
        lhs, rhs, sizes = ((4096, 2048), dtype), ((8, 2048, 2048), dtype), ((8,), "int32")
        assert compiled(generation, product, lhs, rhs, sizes)[1] == ["megablox"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (80, 80), (192, 128)])
def test_head_sizes_that_are_no_multiple_of_a_lane_compile(size, value_size):
    shapes = [((1, 256, 2, n), "bfloat16") for n in (size, size, value_size)] + [((1, 256), "int32")]
    assert compiled("tpu-v5p-8", attend, *shapes)[1] == ["splash"]


def test_every_entry_of_the_block_tables_is_for_a_target_and_reached():
    targets = {t.name for t in TARGETS}
    for table in (SPLASH, GROUPED, PAGED):
        assert table.keys() == {*targets, ""}
    for blocks in SPLASH.values():
        rows = {f: n for f, n in attrs.asdict(blocks).items() if f != "max_fused_blocks"}
        assert all(n % LANES == 0 and largest_divisor(8192, n) == n for n in rows.values())
        assert blocks.key % blocks.key_compute == blocks.backward_key % blocks.backward_key_compute == 0
        assert shrink_blocks(blocks, 512) == blocks
        assert shrink_blocks(blocks, 1024).query == blocks.query // 2


@pytest.mark.parametrize("target", sorted(SPLASH))
def test_the_blocks_are_those_of_the_target(target, monkeypatch):
    block_log, paged = [], []
    monkeypatch.setattr(splash, "_local", lambda q, *a, blocks, **k: block_log.append(blocks) or q)
    monkeypatch.setattr(megablox.ops, "gmm", lambda lhs, rhs, sizes, dtype, tiling: block_log.append(tiling) or lhs)
    with selection.use(selection.Selection(platform="tpu", target=target)):
        x = jnp.ones((1, 4096, 2, 128), jnp.bfloat16)
        jax.eval_shape(lambda x: AttentionOp(x, x, x, mask=Causal(), scale=1.0).run(), x)
        y = jnp.ones((4096, 4096), jnp.bfloat16)
        jax.eval_shape(lambda y: GroupedMatmulOp(y, y[None], jnp.asarray([4096])).run(), y)
        z, ids = jnp.ones((64, 16, 128), jnp.bfloat16), jnp.zeros((4, 256), jnp.int32)
        monkeypatch.setattr(ragged_paged.library, "ragged_paged_attention", lambda q, *a, **k: paged.append(k) or q)
        row = ids[0, :5]
        jax.eval_shape(
            lambda z: PagedAttentionOp(z, z[:, :8, None].repeat(2, 2), ids, row[:4], row, row[:1], scale=1.0).run(), z
        )
    keys = paged[0]["num_kv_pages_per_block"] * 8
    assert (paged[0]["num_queries_per_block"], keys) == (PAGED[target].queries, PAGED[target].keys)
    assert block_log == [SPLASH[target], (GROUPED[target].rows, GROUPED[target].inner, GROUPED[target].outer)]
