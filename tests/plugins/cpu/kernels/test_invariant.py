"""Batch-invariant attention in C++: rows, pages, tiles and devices give the same bits, close to XLA's results."""

import functools

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.mesh import DEFAULT_RULES, Mesh
from axlearn_core.kernels import selection
from axlearn_core.nn.sharding import logical_rules
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_cpu.kernels.invariant import PAGES, ROWS, attend_rows
from axlearn_plugins_cpu.kernels.paged_attention import attend
from axlearn_plugins_plan.flops import ScopedSelection, works
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.invariant import InvariantAttentionOp, InvariantPagedAttentionOp
from axlearn_plugins_transformer.kernels.mask_arrays import select_tokens, separate_queries
from axlearn_plugins_transformer.kernels.masks import (
    Causal,
    Chunks,
    FixedPrefix,
    Segments,
    SelectedKeys,
    SlidingWindow,
)
from axlearn_plugins_transformer.kernels.paged_attention import Split
from support.paged_calls import INSTRUCTIONS, call

LENGTH, HEADS, GROUPS = 300, 6, 2


def rows(batch=2, length=LENGTH, size=32, op=InvariantAttentionOp, window=None, seed=0, **options):
    rng = np.random.default_rng(seed)
    query, key, value = (
        jnp.asarray(rng.standard_normal((batch, length, heads, size)), jnp.float32) for heads in (HEADS, GROUPS, GROUPS)
    )
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    return op(query, key, value, mask=mask, scale=0.2, **options)


def in_pages(dense, row, split, lengths, slots=16, seed=0, heads_first=True):
    """Return the tokens of one row as requests of these lengths in scattered pages, and a mask of the new tokens."""
    rng, (length, groups, size) = np.random.default_rng(seed), dense.key.shape[1:]
    most = -(-length // slots)
    table = rng.permutation(most + 5)[:most]
    pages = np.full((most + 5, 2, groups, slots, size), np.nan, np.float32)
    for at in range(length):
        pages[table[at // slots], :, :, at % slots] = dense.key[row, at], dense.value[row, at]
    new = [at for i, n in enumerate(lengths) for at in range(n - (1 if i < split.singles else split.chunk), n)]
    tables = jnp.asarray(np.tile(table, (len(lengths), 1)), jnp.int32)
    lengths, none = jnp.asarray(lengths, jnp.int32), jnp.zeros((len(lengths) + 1,), jnp.int32)
    options = {
        "scale": dense.scale,
        "mask": dense.mask,
        "softcap": dense.softcap,
        "heads_first": True,
        "split": split,
    }
    query = dense.query[row, jnp.asarray(new)]
    return InvariantPagedAttentionOp(query, jnp.asarray(pages), tables, lengths, none, none[:1], **options), new


def assert_same_bits(got, expected):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(expected).view(np.uint32))


def run_rows(op, instructions=0):
    return jax.jit(functools.partial(attend_rows, op, instructions=instructions))(
        op.query, op.key, op.value, library.sinks(op)
    )


def run_pages(op, instructions=0):
    return jax.jit(lambda: attend(op, instructions, invariant=True))()


@pytest.mark.fast_cases("{'length': 129}-2", "{'length': 129}-3")
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"softcap": 3.0}, {"size": 80, "window": 7}, {"length": 129}], ids=str
)
def test_pages_and_rows_have_the_same_bits(options, instructions):
    if instructions > library.instructions:
        pytest.skip(f"needs a processor with instruction set {instructions}")
    dense = rows(**options)
    expected = np.asarray(run_rows(dense, instructions))
    length = dense.query.shape[1]
    for split, lengths in (
        (Split(4, 1), [1, 64, 65, length]),
        (Split(0, 1), [2, 100, length]),
        (Split(1, 7), [length, 7, 70, length - 3]),
        (Split(0, 50), [50, 77, length]),
    ):
        paged, new = in_pages(dense, 1, split, lengths)
        assert_same_bits(run_pages(paged, instructions), expected[1, new])


def test_pages_of_another_order_and_size_have_the_same_bits():
    dense = rows()
    expected = np.asarray(run_rows(dense))
    for slots, heads_first in ((7, True), (32, True), (16, False)):
        paged, new = in_pages(dense, 0, Split(2, 30), [1, 130, 200], slots=slots, heads_first=heads_first)
        program = selection.Selection(platform="cpu", gradients=False)
        with selection.use(program):
            got = jax.jit(paged.run)()
        assert [choice.name for choice in program.choices] == ["native"]
        assert_same_bits(got, expected[0, new])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks", "prefix", "selected", "documents"])
def test_other_masks_have_the_same_bits_in_kernels_of_xla(name):
    rng, own = np.random.default_rng(1), np.arange(LENGTH)[None, :, None]
    chosen = jnp.asarray(np.concatenate([rng.integers(0, LENGTH, (1, LENGTH, 40)), own], axis=-1), jnp.int32)
    ids = jnp.asarray(np.arange(LENGTH)[None] // 90, jnp.int32)
    mask = {
        "chunks": Causal() & Chunks(70),
        "prefix": Causal() | FixedPrefix(60),
        "selected": Causal() & SelectedKeys(chosen),
        "documents": Causal() & Segments(ids, ids),
    }[name]
    dense = attrs.evolve(rows(batch=1), mask=mask)
    program = selection.Selection(platform="cpu", gradients=False)
    with selection.use(program):
        expected = np.asarray(jax.jit(dense.run)())
        for split, lengths in ((Split(2, 1), [64, 300]), (Split(1, 50), [200, 77, 300])):
            paged, new = in_pages(attrs.evolve(dense, mask=Causal()), 0, split, lengths)
            separate = select_tokens(separate_queries(mask, 1, LENGTH), jnp.asarray(new))
            got = jax.jit(attrs.evolve(paged, mask=separate).run)()
            assert_same_bits(got, expected[0, new])
    assert {choice.name for choice in program.choices} == {"xla"}
    assert "does not support mask" in program.choices[0].rejected["native"]


def test_what_pages_hold_behind_a_request_changes_no_bit():
    paged, _ = in_pages(rows(), 0, Split(0, 30), [130])
    behind = paged.pages.at[paged.table[0, 8], :, :, 2:].set(3e38)  # the slots after the last token
    assert_same_bits(run_pages(attrs.evolve(paged, pages=behind)), run_pages(paged))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("length", [1, 63, 90, 129])
def test_a_row_does_not_depend_on_the_batch_or_on_what_comes_later(length, window):
    dense = rows(batch=3, window=window)
    cut = {name: getattr(dense, name)[1:2, :length] for name in ("query", "key", "value")}
    assert_same_bits(run_rows(attrs.evolve(dense, **cut)), run_rows(dense)[1:2, :length])


@pytest.mark.slow
def test_devices_have_the_bits_of_one():
    """Rows and heads are split over the devices; gradients are compared too."""
    dense = rows(batch=4)

    def both(*operands):
        result, pull = jax.vjp(lambda *x: attrs.evolve(dense, **dict(zip(NAMES, x, strict=True))).run(), *operands)
        return result, pull(jnp.cos(result))

    def run():
        program = selection.Selection(platform="cpu")
        with selection.use(program):
            results = jax.jit(lambda *x: both(*x))(dense.query, dense.key, dense.value)  # traced anew
        assert [choice.name for choice in program.choices] == ["native"]
        return results

    (one, gradients), mesh = run(), make_mesh(Mesh(shape={"data": 2, "tensor": 2}), jax.devices()[:4])
    with logical_rules(mesh, DEFAULT_RULES):
        divided, of_parts = run()
        paged, _ = in_pages(dense, 0, Split(2, 30), [1, 130, 200])
        program = selection.Selection(platform="cpu", gradients=False)
        with selection.use(program):
            pages = jax.jit(paged.run)()
        assert [choice.name for choice in program.choices] == ["native"]
    assert_same_bits(divided, one)
    assert_same_bits(pages, run_pages(paged))
    for got, expected in zip(of_parts, gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


NAMES = "query", "key", "value"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0}, {"size": 16}], ids=str)
def test_values_and_gradients_are_those_of_xla(options):
    dense = rows(**options)

    def loss(kernel, *operands):
        op = attrs.evolve(dense, **dict(zip(("query", "key", "value"), operands, strict=True)))
        result = kernel(op)
        return jnp.sum(result * jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)), result

    both = []
    for kernel in (ROWS, lambda op: op.reference()):
        grad = jax.value_and_grad(functools.partial(loss, kernel), argnums=(0, 1, 2), has_aux=True)
        (_, result), gradients = jax.jit(grad)(dense.query, dense.key, dense.value)
        both.append((result, *gradients))
    for got, expected in zip(*both, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * float(jnp.max(jnp.abs(expected))))


def chosen(op):
    """Return op -> kernel, for a call of the kernel `invariant`."""
    program = selection.Selection(platform="cpu", gradients=False)
    with selection.use(program):
        jax.eval_shape(lambda: op.run("invariant"))
    return {choice.op.name: choice.name for choice in program.choices}


def test_the_kernel_invariant_is_computed_here():
    assert chosen(rows(op=AttentionOp)) == {"attention": "invariant", "invariant_attention": "native"}
    paged = call("tokens and chunks")
    assert chosen(paged) == {"paged_attention": "invariant", "invariant_paged_attention": "native"}


@pytest.mark.parametrize("options", [{"size": 24}, {"bias": LinearBias((0.5,) * HEADS)}], ids=["size", "bias"])
def test_what_one_refuses_the_other_does(options):
    """Otherwise a server would compute in another order than training."""
    assert chosen(rows(op=AttentionOp, **options))["invariant_attention"] == "xla"
    assert chosen(call("tokens and chunks", **options))["invariant_paged_attention"] == "xla"


def test_refusals_of_both(monkeypatch):
    context = selection.KernelContext(platform="cpu", gradients=False)
    half = rows()
    half = attrs.evolve(half, **{name: getattr(half, name).astype(jnp.bfloat16) for name in ("query", "key", "value")})
    assert "it needs float32" in ROWS.supports(half, context)
    mixed = attrs.evolve(rows(), value=half.value)
    assert "got float32, float32, bfloat16" in ROWS.supports(mixed, context)
    assert "it needs float32" in PAGES.supports(call("three tokens", dtype="bfloat16"), context)
    monkeypatch.setattr(library, "unavailable_reason", "it was not built")
    assert ROWS.supports(rows(), context) == PAGES.supports(call("three tokens"), context) == "it was not built"


def test_shapes_that_do_not_belong_together():
    op = rows()
    for operands in (
        (op.query[:1], op.key, op.value, library.sinks(op)),
        (op.query, op.key, op.value[:, 1:], library.sinks(op)),
        (op.query[:, :, :5], op.key, op.value, library.sinks(op)),
        (op.query, op.key, op.value, jnp.zeros((1,), jnp.float32)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the shapes of the operands do not match"):
            jax.block_until_ready(jax.jit(functools.partial(attend_rows, op))(*operands))


def test_pages_have_the_numbers_of_the_reference():
    paged = call("tokens and chunks")
    expected = np.asarray(jax.jit(paged.reference)())
    np.testing.assert_allclose(run_pages(paged), expected, rtol=1e-5, atol=1e-5 * float(np.max(np.abs(expected))))


def test_plans_count_what_it_multiplies():
    dense, paged = rows(op=AttentionOp, batch=2), call("tokens and chunks")
    for op, kernel in ((dense, "invariant"), (paged, "native")):
        with selection.use(ScopedSelection(platform="cpu", gradients=False)) as program:
            jaxpr = jax.make_jaxpr(lambda op=op, kernel=kernel: op.run(kernel))().jaxpr
        assert sum(work.flops for work in works(jaxpr, program.scopes)) == op.flops()
