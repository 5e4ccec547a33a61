"""Calls of the ops that this repository's plugins define."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_recurrent.kernels.linear_attention import LinearAttentionOp
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp, Options
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS, GatedLinearUnitOp
from axlearn_plugins_transformer.kernels.invariant import InvariantAttentionOp, InvariantPagedAttentionOp
from axlearn_plugins_transformer.kernels.masks import (
    Causal,
    Chunks,
    FixedPrefix,
    Full,
    Prefix,
    Segments,
    SelectedKeys,
    SlidingWindow,
)
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split
from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp
from axlearn_plugins_transformer.recurrence import Reload
from axlearn_testing import Case

RNG = np.random.default_rng(0)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def array(x, dtype):
    """Return an array of JAX without a compilation. Every test process makes all cases, and `jnp.asarray` compiles a program."""
    return jax.device_put(np.asarray(x).astype(jnp.dtype(dtype)))


def normal(*shape, dtype="float32", scale=1.0):
    return array(RNG.standard_normal(shape, np.float32) * np.float32(scale), dtype)


def _attend(kernel, query, key, value, mask, sinks=None, op=AttentionOp, **options):
    return op(query, key, value, mask=mask, sinks=sinks, scale=0.3, **options).run(kernel)


WINDOW = Causal() & SlidingWindow(6)
SINKS = array([3.0, -1.0, 0.5, 2.0], "float32")


def _attention(name, mask, *, q=256, k=256, heads=4, groups=2, size=8, dtype="float32", sinks=None, **options):
    operands = (normal(2, q, heads, size, dtype=dtype), *(normal(2, k, groups, size, dtype=dtype) for _ in "kv"), mask)
    operands = (*operands, sinks) if sinks is not None else operands
    return Case(
        name=f"{name}-{q}x{k}-{heads}of{groups}-{dtype}",
        run=functools.partial(_attend, **options),
        operands=operands,
        tolerance=TOLERANCE[dtype],
    )


def _selected(queries, rows=1, keys=None, count=20):
    return jnp.asarray(RNG.integers(-2, keys or queries, (rows, queries, count)), jnp.int32)


def _attentions():
    ids = array(np.sort(RNG.integers(1, 5, (2, 256)), axis=1), "int32")
    prefix = array([3, 140], "int32")
    window = Causal() & SlidingWindow(100)
    yield _attention("causal", Causal())
    yield _attention("causal", Causal(), dtype="bfloat16")
    yield _attention("causal", Causal(), groups=1)
    yield _attention("odd", Causal(), q=100, k=100)
    yield _attention("window", window, softcap=2.0)
    yield _attention("packed", window & Segments(ids, ids))
    yield _attention("prefix", Causal() | Prefix(prefix))
    yield _attention("chunks", Causal() & Chunks(100))
    yield _attention("selected", (Causal() & SelectedKeys(_selected(256, 2))) | FixedPrefix(30))
    yield _attention("alibi", Causal(), bias=LinearBias((0.5, 0.25, 0.125, 0.0625)))
    yield _attention("full", Full(), q=128, k=256)
    slots = {"query_slots": array([[200]], "int32"), "key_slots": array(np.arange(256)[None], "int32")}
    yield _attention("decoding", Causal(), q=1, **slots)
    yield _attention("sinks", window, sinks=SINKS)
    yield _attention("sinks-decoding", Causal(), q=1, sinks=SINKS, **slots)


def _invariant_attentions():
    for name, mask, more in (
        ("causal", Causal(), {"size": 16}),
        ("causal", Causal(), {"size": 8}),
        ("window", Causal() & SlidingWindow(100), {"size": 32, "softcap": 2.0}),
        ("alibi", Causal(), {"size": 16, "bias": LinearBias((0.5, 0.25, 0.125, 0.0625))}),
        ("sinks", Causal(), {"size": 16, "sinks": SINKS}),
        ("chunks", Causal() & Chunks(100) & SelectedKeys(_selected(256, 2)), {"size": 16}),
    ):
        yield _attention(name, mask, op=InvariantAttentionOp, **more)


def _entropy(kernel, hidden, weight, targets, weights, options):
    return CrossEntropyOp(hidden, weight, targets, weights, options).run(kernel)[0]


def _entropies():
    for chunk, softcap, dtype in [*itertools.product((16, 7), (None, 5.0), ["float32"]), (7, 5.0, "bfloat16")]:
        options = Options(dtype=dtype, chunk=chunk, softcap=softcap, z_loss=1e-3 if softcap else 0.0)
        yield Case(
            name=f"chunk{chunk}-softcap{softcap}-{dtype}",
            run=functools.partial(_entropy, options=options),
            operands=(normal(2, 16, 8, dtype=dtype), normal(8, 32), RNG.integers(0, 32, (2, 16)), normal(2, 16)),
            tolerance=TOLERANCE[dtype],
        )


def grouped(kernel, lhs, rhs, sizes):
    used = jnp.arange(lhs.shape[0]) < jnp.sum(sizes)  # rows after the last group are unspecified
    return jnp.where(used[:, None], GroupedMatmulOp(jnp.where(used[:, None], lhs, 0), rhs, sizes).run(kernel), 0)


def _grouped():
    grid = ([100, 0, 156], [0, 0, 200], [1, 2, 3], [128, 128, 0], [0, 0, 0])
    for sizes, dtype in [*itertools.product(grid, ["float32"]), ([100, 0, 156], "bfloat16")]:
        yield Case(
            name=f"{'-'.join(map(str, sizes))}-{dtype}",
            run=grouped,
            operands=(
                normal(256, 16, dtype=dtype),
                normal(3, 16, 8, dtype=dtype),
                array(sizes, "int32"),
            ),
            tolerance=TOLERANCE[dtype],
        )


def _normalized(kernel, x, weight, **options):
    return RMSNormOp(x, weight, **options).run(kernel)


def _norms():
    options = {"eps": 1e-5, "offset": 0.0}
    for shape, dtype, offset in (
        ((2, 16, 32), "float32", 0.0),
        ((2, 16, 24), "float32", 1.0),
        ((2, 16, 4, 8), "float32", 0.0),
        ((2, 16, 32), "bfloat16", 1.0),
        ((2, 3, 4, 5, 8), "float32", 0.0),
    ):
        yield Case(
            name=f"{'x'.join(map(str, shape))}-offset{offset}-{dtype}",
            run=functools.partial(_normalized, **options | {"offset": offset}),
            operands=(normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)),
            tolerance=TOLERANCE[dtype],
        )


def projection(weight, bias=None):
    """Make a linear layer with these parameters."""
    dims = {"input_dims": weight.shape[:1], "output_dims": weight.shape[1:]}
    precision = Precision(str(weight.dtype), str(weight.dtype))
    config = Linear.Config(bias=bias is not None, **dims)
    layer = config.build(axes=("embed", "mlp"), rngs=nnx.Rngs(0), precision=precision)
    layer.weight = nnx.Param(weight)
    if bias is not None:
        layer.bias = nnx.Param(bias)
    return layer


def gated(kernel, x, gate, up, bias=None, activation="silu"):
    """Run the op `gated_linear_unit` on arrays."""
    return GatedLinearUnitOp(
        x, projection(gate, bias), projection(up), hidden_dim=gate.shape[1], activation=activation
    ).run(kernel)


def _gated_units():
    for activation, hidden, bias, dtype in (
        *((a, 64, False, "float32") for a in ACTIVATIONS),
        ("silu", 64, True, "float32"),
        *((a, 64, False, "bfloat16") for a in ACTIVATIONS),
        ("silu", 80, False, "bfloat16"),
    ):
        more = (normal(hidden, dtype=dtype),) if bias else ()
        yield Case(
            name=f"{activation}-{hidden}-{'bias-' if bias else ''}{dtype}",
            run=functools.partial(gated, activation=activation),
            operands=(
                normal(2, 16, 32, dtype=dtype),
                *(normal(32, hidden, dtype=dtype, scale=1 / 6) for _ in "gu"),
                *more,
            ),
            tolerance=TOLERANCE[dtype],
        )


def _read(kernel, query, pages, table, lengths, starts, count, op=PagedAttentionOp, **options):
    actual = op(query, pages, table, lengths, starts, count, scale=0.2, **options).run(kernel)
    used = jnp.arange(query.shape[0]) < starts[count[0]]
    return jnp.where(used[:, None, None], actual, 0)  # tokens of unused requests are unspecified


def paged(name, *, new, lengths, heads=4, groups=2, size=8, slots=8, dtype="float32", tokens=0, **options):
    """Make requests with these new tokens and lengths, a spare request and `tokens` spare tokens, in unordered pages."""
    most = max(-(-n // slots) for n in lengths)
    table = np.zeros((len(new) + 1, most), np.int32)
    order = iter(RNG.permutation(len(new) * most).tolist())
    for row, length in zip(table, lengths, strict=False):
        used = -(-length // slots)
        row[:used] = [next(order) for _ in range(used)]
    starts = np.cumsum([0, *new, 0])
    num_groups = groups if options.get("value_size") else 2 * groups
    pages = np.array(normal(len(new) * most, slots, num_groups, size, dtype=dtype))
    for row, length in zip(table, lengths, strict=False):
        pages[row[(length - 1) // slots], (length - 1) % slots + 1 :] = 0 if options.get("finite") else np.nan
    if options.get("heads_first"):
        pages = np.transpose(pages.reshape(*pages.shape[:2], groups, 2, size), (0, 3, 2, 1, 4))
    operands = (
        normal(starts[-1] + tokens, heads, size, dtype=dtype),
        array(pages, dtype),
        *(array(x, "int32") for x in (table, [*lengths, 0], starts, [len(new)])),
    )
    run = functools.partial(_read, **options)
    return Case(name=f"{name}-{dtype}", run=run, operands=operands, tolerance=TOLERANCE[dtype], gradients=False)


def _pages():
    yield paged("decoding", new=[1, 1, 1], lengths=[5, 17, 8])
    yield paged("prefill", new=[9, 70], lengths=[9, 70], tokens=3)
    yield paged("mixed", new=[1, 12, 1], lengths=[40, 20, 1], mask=WINDOW)
    yield paged("capped", new=[4], lengths=[30], softcap=2.0, groups=1, dtype="bfloat16")
    split = {"new": [1, 1, 4, 4], "lengths": [40, 5, 30, 4], "tokens": 4, "split": Split(2, 4)}
    yield paged("split", **split)
    yield paged("split-window", **split, mask=WINDOW, softcap=2.0, heads_first=True)
    yield paged("split-bias", **split, bias=LinearBias((0.5, 0.25, 0.125, 0.0625)), heads_first=True)
    yield paged("split-bfloat16", **split, dtype="bfloat16")
    yield paged("split-wide", **split, mask=Causal() & SlidingWindow(20), softcap=2.0, size=32, heads_first=True)
    yield paged("split-wide", **split, size=32, heads=6, dtype="bfloat16", heads_first=True)
    yield paged("sinks", new=[1, 12, 1], lengths=[40, 20, 1], mask=WINDOW, sinks=SINKS)
    yield paged("split-sinks", **split, sinks=SINKS, size=16, heads_first=True)
    ids = jnp.asarray(RNG.integers(0, 2, (14, 40)), jnp.int32)
    selected = SelectedKeys(jnp.swapaxes(_selected(14, 1, 40), 0, 1))
    for name, mask in (
        ("chunks", Causal() & Chunks(7)),
        ("prefix", Causal() | FixedPrefix(28) | Prefix(jnp.arange(14, dtype=jnp.int32))),
        ("selected", (Causal() & selected) & Segments(jnp.ones((14, 1), jnp.int32), ids)),
    ):
        yield paged(f"split-{name}", **split, mask=mask, heads_first=name == "prefix", size=16)
    yield paged("split-finite", **split, size=32, finite=True)
    yield paged("split-finite-window", **split, size=16, mask=WINDOW, softcap=2.0, dtype="bfloat16", finite=True)
    yield paged("split-singles", new=[1, 1, 1], lengths=[70, 1, 8], tokens=1, split=Split(4, 1), value_size=6, groups=1)


def _invariant_pages():
    # Whole tiles of 32 rows and blocks of 128 keys: the reference would multiply padding, which `flops` does not count.
    split = {"new": [16, 16], "lengths": [128, 100], "tokens": 16, "split": Split(0, 16), "heads_first": True}
    for name, more in (
        ("split", {"size": 16}),
        ("split-window", {"size": 32, "mask": WINDOW, "softcap": 2.0}),
        ("split-bias", {"size": 16, "bias": LinearBias((0.5, 0.25, 0.125, 0.0625))}),
        ("split-sinks", {"size": 16, "sinks": SINKS}),
        ("split-masks", {"size": 16, "mask": (Causal() & Chunks(50)) | Prefix(jnp.full((48,), 90, jnp.int32))}),
    ):
        yield paged(name, op=InvariantPagedAttentionOp, **split, **more)


def _recur(kernel, query, key, value, decay, strength=None, documents=None, state=None, reload=None, chunk=None):
    reload = None if reload is None else Reload(restarts=reload[0], states=reload[1], chunk=chunk)
    return LinearAttentionOp(
        query, key, value, decay, strength=strength, documents=documents, state=state, reload=reload, scale=0.3
    ).run(kernel)


def _recurrences():
    rows, size, keys, heads, groups, length = 2, 8, 16, 4, 2, 100

    def case(name, *, delta=True, element=False, dtype="float32", tokens=length, chunk=None, **optional):
        key = np.asarray(normal(rows, tokens, groups, keys))
        operands = [
            normal(rows, tokens, groups, keys, dtype=dtype),
            array(key / np.linalg.norm(key, axis=-1, keepdims=True), dtype),
            normal(rows, tokens, heads, size, dtype=dtype),
            array(-np.abs(normal(rows, tokens, heads, keys) if element else normal(rows, tokens, heads)), "float32"),
            array(np.abs(np.sin(normal(rows, tokens, heads))), "float32") if delta else None,
        ]
        run = functools.partial(_recur, chunk=chunk, **optional)
        return Case(name=f"{name}-{dtype}", run=run, operands=tuple(operands), tolerance=TOLERANCE[dtype])

    documents = array(np.sort(RNG.integers(0, 6, (rows, length)), axis=1), "int32")
    state = normal(rows, heads, keys, size)
    reload = array([[True, False, True], [False, True, False]], bool), normal(rows, 3, heads, keys, size)
    yield case("delta")
    yield case("delta", dtype="bfloat16")
    yield case("delta-elements", element=True)
    yield case("delta-documents", documents=documents, state=state)
    yield case("elements-documents", element=True, documents=documents, state=state)
    yield case("sum", delta=False)
    yield case("sum-documents", delta=False, documents=documents)
    yield case("reload", tokens=96, chunk=32, reload=reload)
    yield case("long-chunks", tokens=192, chunk=64, reload=reload)
    yield case("odd-chunks", tokens=30, chunk=10, reload=reload, element=True)
    yield case("one-token", tokens=1, state=state)


CASES = {
    AttentionOp: list(_attentions()),
    InvariantAttentionOp: list(_invariant_attentions()),
    InvariantPagedAttentionOp: list(_invariant_pages()),
    CrossEntropyOp: list(_entropies()),
    GatedLinearUnitOp: list(_gated_units()),
    GroupedMatmulOp: list(_grouped()),
    LinearAttentionOp: list(_recurrences()),
    PagedAttentionOp: list(_pages()),
    RMSNormOp: list(_norms()),
}
