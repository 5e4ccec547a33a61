"""Paged attention by JAX's kernel: supported calls, results, and compilation for every GPU."""

import functools
import importlib
import itertools
import sys
from types import SimpleNamespace
from unittest import mock

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.contracts.mesh import DEFAULT_RULES, Mesh
from axlearn_core.kernels import selection
from axlearn_core.nn.sharding import logical_rules
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.kernels import paged_parts
from axlearn_plugins_gpu.kernels.blocks import PAGED, num_table_parts, paged_blocks
from axlearn_plugins_gpu.kernels.interpreter import interpret
from axlearn_plugins_gpu.kernels.paged_attention import TRITON
from axlearn_plugins_serving.local_engine import serve as server
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import Causal, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split
from axlearn_plugins_transformer.kernels.paged_split import XLA_SPLIT
from support import op_cases, serving_models
from support.gpu_programs import Interpreted, compiled, kernel_calls
from support.paged_calls import call

H100 = KernelContext(platform="gpu", target="h100", gradients=False)
LATER_TARGETS = [pytest.param(t, marks=pytest.mark.slow) for t in ("a100", "h200", "b200")]


def finite_call(requests, *, heads_first=False, **options):
    """Make a call with pages like a cache's: finite, with the keys and values of a head interleaved."""
    op = call(requests, **options)
    pages, scales = jnp.nan_to_num(op.pages), op.scales
    if not heads_first:
        pages = _side_by_side(pages)
        scales = None if scales is None else _side_by_side(scales)
    return attrs.evolve(op, pages=pages, scales=scales, heads_first=heads_first, finite=True)


def _side_by_side(x):
    """Transpose pages from [P, 2, G, S, ...] to [P, S, 2 G, ...]."""
    x = jnp.moveaxis(x, 3, 1)
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], -1, *x.shape[4:])


def computed(op):
    """Run the kernel in Pallas' interpreter."""
    with interpret(), selection.use(selection.Selection(target="h100", declared=lambda _: ())):
        return np.asarray(jax.jit(lambda: TRITON(op))(), np.float32)


def error(op):
    """Return the largest difference from the reference, relative to the largest element."""
    assert TRITON.supports(op, H100) is None
    expected = np.asarray(jax.jit(op.reference)(), np.float32)
    return np.max(np.abs(computed(op) - expected)) / np.max(np.abs(expected))


@pytest.mark.slow_cases("test_values_and_gradients_match_reference[split-finite-window-bfloat16]")
class TestKernel(Interpreted):
    op = PagedAttentionOp
    name = "pallas-triton"
    cases = tuple(c for c in op_cases.CASES[PagedAttentionOp] if "finite" in c.name)


@pytest.mark.fast_cases("(3, 0, 1, [5, 17, 1])-{}", "(1, 1, 3, [9, 7])-{'slots': 4, 'window': 5}")
@pytest.mark.parametrize(
    ("requests", "options"),
    [
        ((3, 0, 1, [5, 17, 1]), {}),
        ((1, 1, 3, [9, 7]), {"slots": 4, "window": 5}),
        ((2, 2, 4, [300, 40, 130, 4]), {}),
        ((0, 2, 40, [40, 400]), {"heads": 10, "groups": 2}),
        ((0, 1, 100, [133]), {"heads": 2, "groups": 2}),
        ((2, 2, 4, [300, 40, 130, 4]), {"window": 33, "softcap": 3.0}),
        ((2, 2, 4, [300, 40, 130, 4]), {"window": 3}),
        ((0, 2, 40, [40, 400]), {"window": 17}),
        ((2, 1, 20, [70, 90, 100]), {"slots": 1, "window": 20}),
        ((2, 2, 4, [300, 40, 130, 4]), {"store": "int8", "window": 100}),
        ((2, 2, 4, [300, 40, 130, 4]), {"heads_first": True, "store": "int8", "window": 100}),
        ((2, 2, 4, [300, 40, 130, 4]), {"heads_first": True, "size": 64}),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_reference(requests, options):
    assert error(finite_call(requests, **options)) < 2e-5


@pytest.mark.slow
def test_numbers_of_16_bits():
    for store in (None, "int8", "float8_e4m3fn"):
        assert error(finite_call((2, 2, 8, [300, 40, 130, 8]), dtype="bfloat16", store=store)) < 2e-2


@pytest.mark.slow
def test_random_requests():
    rng = np.random.default_rng(0)
    for seed in range(60):
        singles, chunks, chunk = int(rng.integers(0, 4)), int(rng.integers(0, 3)), int(rng.integers(1, 50))
        lengths = [*rng.integers(1, 200, singles), *(chunk + rng.integers(0, 150, chunks))]
        options = {"slots": int(rng.choice([1, 4, 16])), "size": int(rng.choice([16, 32])), "seed": seed}
        if rng.random() < 0.6:
            options["window"] = int(rng.integers(1, 220))
        if rng.random() < 0.4:
            options["softcap"] = 3.0
        if lengths:
            assert error(finite_call((singles, chunks, chunk, [int(n) for n in lengths]), **options)) < 2e-5, options


@pytest.mark.slow
def test_keys_of_other_requests_are_not_seen():
    op = finite_call((2, 1, 8, [30, 40, 50]), slots=8)
    elsewhere = np.setdiff1d(np.arange(op.pages.shape[0]), np.asarray(op.table[0, :4]))
    changed = attrs.evolve(op, pages=op.pages.at[elsewhere].set(1e4))
    np.testing.assert_array_equal(computed(changed)[0], computed(op)[0])
    assert not np.array_equal(computed(changed)[1], computed(op)[1])


def test_requests_that_nobody_has():
    assert np.all(computed(finite_call((2, 1, 4, [9, 0, 0])))[1] == 0), "no key is seen"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"mask": Causal() & SlidingWindow(5), "softcap": 2.0}, None),
        ({"split": Split(2, 300)}, "300 tokens, more than 128"),
        ({"split": None}, "not known at compile time"),
        ({"bias": LinearBias((0.5,) * 6)}, "not support a bias"),
        ({"finite": False}, "may be NaN"),
        ({"value_size": 16}, "share their storage"),
        ({"pages": jax.ShapeDtypeStruct((9, 16, 4, 32), "float32")}, None),
        ({"pages": jax.ShapeDtypeStruct((9, 12, 4, 32), "float32")}, "12 slots, which is not a power of two"),
        ({"pages": jax.ShapeDtypeStruct((9, 64, 4, 32), "float32")}, None),
        ({"pages": jax.ShapeDtypeStruct((9, 128, 4, 32), "float32")}, "128 slots, more than the 64 keys"),
        ({"pages": jax.ShapeDtypeStruct((9, 16, 4, 32), "bfloat16")}, "queries are float32 and the pages bfloat16"),
        ({"pages": jax.ShapeDtypeStruct((2**20, 16, 4, 32), "int8")}, "signed 32-bit index"),
        ({"pages": jax.ShapeDtypeStruct((2**22, 16, 4, 32), "float32")}, None),
        ({"query": jax.ShapeDtypeStruct((18, 6, 80), "float32")}, "head size 80 is not a power of two"),
        ({"query": jax.ShapeDtypeStruct((18, 6, 32), "float64")}, "queries, got float64"),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_do(options, reason):
    op = attrs.evolve(finite_call((2, 1, 16, [20, 30, 40])), **options)
    answer = TRITON.supports(op, H100)
    assert answer is None if reason is None else reason in answer


def test_float8_needs_a_gpu_that_has_it():
    op = finite_call((2, 0, 1, [20, 30]), store="float8_e4m3fn")
    assert TRITON.supports(op, H100) is None
    assert TRITON.supports(op, attrs.evolve(H100, target="a100")) == "a100 does not support float8"
    assert "is not known to run on" in TRITON.supports(op, attrs.evolve(H100, target="rtx"))


@pytest.mark.parametrize(
    "modules", [(compat.PAGED_ATTENTION,), (compat.PAGED_ATTENTION, "jax.experimental.pallas.triton")]
)
def test_a_jax_without_the_kernel(monkeypatch, modules):
    for name in ("paged_attention", "paged_parts"):  # import again, as with such a JAX
        monkeypatch.delitem(sys.modules, f"axlearn_plugins_gpu.kernels.{name}")
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    kernel = importlib.import_module("axlearn_plugins_gpu.kernels.paged_attention").TRITON
    answer = kernel.supports(finite_call((2, 0, 1, [20, 30])), H100)
    assert f"JAX {jax.__version__} does not have the kernel in {compat.PAGED_ATTENTION}" in answer


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "window"), [(8, None), (1, None), (4, 5), (8, 8)])
def test_a_block_has_as_many_keys_as_an_instruction_of_tensor_cores(slots, window):
    """With fewer keys, Triton fills the instruction with copies of registers, and adds each product several times."""
    run = functools.partial(serve, split=(4, 8), window=window)
    pages_of_blocks = []

    def spied(kernel, *args, **options):
        pages_of_blocks.append(kernel.keywords["pages_per_compute_block"])
        return pallas.pallas_call(kernel, *args, **options)

    most = 1 if window is None else 16
    with mock.patch.object(paged_parts, "pallas", SimpleNamespace(pallas_call=spied, BlockSpec=pallas.BlockSpec)):
        compiled(run, "h100-1x1", *shapes(split=(4, 8), chunks=2, slots=slots, most=max(most, 8 // slots), places=500))
    assert len(pages_of_blocks) == 2
    assert all(pages * slots >= 16 for pages in pages_of_blocks)


def test_what_a_device_has_of_the_pages_is_counted():
    whole = finite_call((2, 0, 1, [20, 30]), heads=8, groups=8)
    narrow = attrs.evolve(whole, pages=jax.ShapeDtypeStruct((2**18, 32, 16, 128), "int8"))
    narrow = attrs.evolve(narrow, query=jax.ShapeDtypeStruct((2, 8, 128), "bfloat16"), scales=whole.query)
    assert TRITON.supports(narrow, H100) is None, "above 2**32 bytes JAX uses 64-bit indices"
    with logical_rules(make_mesh(Mesh(shape={"tensor": 8})), DEFAULT_RULES):
        assert "signed 32-bit index" in TRITON.supports(narrow, H100)


@pytest.mark.slow
def test_devices_attend_with_their_own_heads():
    op = finite_call((2, 1, 8, [30, 40, 50]), heads=8, groups=4)
    with logical_rules(make_mesh(Mesh(shape={"fsdp": 2, "tensor": 4})), DEFAULT_RULES):
        assert TRITON.supports(op, H100) is None
        divided = computed(op)
        uneven = finite_call((2, 1, 8, [30, 40, 50]), heads=8, groups=1)
        assert "not split over devices the same way" in TRITON.supports(uneven, H100)
    np.testing.assert_allclose(divided, computed(op), atol=1e-6)


@pytest.mark.slow
def test_a_server_generates_the_same(monkeypatch):
    """Test chunks of prompts next to decoding requests, long windows, and a shared prefix."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 64, n).tolist() for n in (30, 3, 17, 9, 26)]
    prompts.append([*prompts[0][:16], 5, 7])
    sizes = {
        "max_context": 48,
        "max_rows": 4,
        "max_step_tokens": 24,
        "chunk": 8,
        "block_size": 4,
        "kernel": "xla-split",
    }
    sizes |= {"row_buckets": (), "chunk_buckets": ()}

    def generated():
        with server(serving_models.model(), set={f"runner.{n}": v for n, v in sizes.items()}) as engine:
            results = engine.generate(prompts, max_tokens=12, temperature=0)
        return [(r.tokens, [x.logprob for x in r.logprobs]) for r in results]

    expected = generated()
    calls = []

    def attend(self, op):
        calls.append(op)
        with interpret(), selection.use(selection.Selection(target="h100", declared=lambda _: ())):
            return TRITON(op)

    monkeypatch.setattr(type(XLA_SPLIT), "__call__", attend)
    got = generated()
    assert calls
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def serve(
    query, pages, table, lengths, starts, count, new, at, *scales, split, window=None, heads_first=False, **options
):
    """Write new keys and values into the pages, then attend to them, like a layer. Return both."""
    pages = pages.at[at].set(new, mode="drop")
    options |= {"scales": scales[0] if scales else None, "heads_first": heads_first, "scale": 0.1, "finite": True}
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    op = PagedAttentionOp(query, pages, table, lengths, starts, count, mask=mask, split=Split(*split), **options)
    return op.run(), pages


def shapes(
    split=(16, 32), chunks=4, heads=32, groups=8, size=128, slots=32, most=64, places=4096, dtype="bfloat16", store=None
):
    requests, tokens = split[0] + chunks, split[0] + chunks * split[1]
    pages = (places, slots, 2 * groups, size)
    axes = (None, None, "tensor")
    whole = [((requests, most), "int32"), ((requests,), "int32"), ((requests + 1,), "int32"), ((1,), "int32")]
    moved = [((16, *pages[1:]), store or dtype, *axes), ((16,), "int32")]
    scales = [(pages[:-1], "float32", *axes)] if store else []
    query = ((tokens, heads, size), dtype, None, "tensor")
    return [query, (pages, store or dtype, *axes), *whole, *moved, *scales]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", *LATER_TARGETS])
def test_it_compiles(target):
    for options, sizes in (
        ({"split": (16, 32)}, {}),
        ({"split": (64, 32)}, {"chunks": 0}),
        ({"split": (1, 32), "window": 512}, {"chunks": 0, "groups": 32}),
        ({"split": (0, 128), "window": 300, "softcap": 50.0}, {"size": 256, "heads": 8, "groups": 4}),
        ({"split": (16, 32)}, {"dtype": "float32", "size": 256, "slots": paged_blocks(target, 1, 256, wide=True).keys}),
        ({"split": (16, 32)}, {"size": 256, "slots": paged_blocks(target, 1, 256, wide=False).keys}),
        ({"split": (16, 32)}, {"slots": 1}),
        ({"split": (16, 32)}, {"store": "int8", "size": 256}),
        *([({"split": (16, 32)}, {"store": "float8_e4m3fn"})] if target != "a100" else []),
    ):
        split = options["split"]
        text, chosen = compiled(
            functools.partial(serve, **options), f"{target}-1x1", *shapes(**sizes | {"split": split})
        )
        assert chosen == ["pallas-triton"]
        assert kernel_calls(text) == (0, (split[0] > 0) + (sizes.get("chunks", 4) > 0))


@pytest.mark.slow
def test_no_page_is_copied():
    sizes = shapes(places=3000)
    text, _ = compiled(functools.partial(serve, split=(16, 32)), "h100-1x1", *sizes)
    pages = "bf16[3000,32,16,128]"
    copies = [line for line in text.splitlines() if f" = {pages}" in line and " copy" in line]
    assert len(copies) <= 1, "only the argument may be copied, because it is not donated"
    assert "[3000,32,8,128]" not in text, "keys and values must not be copied separately"


@pytest.mark.slow
def test_devices_that_are_not_here_send_nothing():
    run = functools.partial(serve, split=(16, 32))
    text, chosen = compiled(run, "h100-8x1", *shapes(), tensor=8)
    assert chosen == ["pallas-triton"]
    assert "bf16[4096,32,2,128]" in text, "each device must have the keys and values of one head"
    assert not any(f"{name}-start" in text or f" {name}(" in text for name in ("all-gather", "all-reduce"))


def test_blocks_fit_and_occupy_the_gpu():
    assert set(PAGED) == {chip.capability for chip in CHIPS.values()}
    for target, rows, size, wide in itertools.product(CHIPS, (1, 7, 32, 500), (16, 64, 128, 256), (False, True)):
        blocks = paged_blocks(target, rows, size, wide=wide)
        assert 16 <= blocks.rows <= 64
        assert blocks.keys >= 16
        bytes_of_keys = blocks.stages * 2 * blocks.keys * size * (4 if wide else 2)
        assert bytes_of_keys <= CHIPS[target].shared - 1024
        assert num_table_parts(target, 1, 1) == 1
        assert num_table_parts(target, 10**6, 64) == 1
        assert num_table_parts(target, 8, 64) * 8 >= 2 * CHIPS[target].cores
