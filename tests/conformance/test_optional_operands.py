"""Every kernel of attention uses each optional operand and each mask, or refuses the call with a reason."""

import functools

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import literals

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.errors import RequestError
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import REFERENCE_KERNEL, choose
from axlearn_plugins_plan.flops import live_equations
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
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
from axlearn_plugins_verify.properties.target_kernels import KernelCall
from support import installed_parts

RNG = np.random.default_rng(0)
TARGETS = {"gpu": "h100", "tpu": "tpu-v5e"}
N, G, H, LENGTH, SLOTS = 4, 2, 128, 256, 16
"""Query heads, key-value heads, head size, tokens of a row, slots of a page."""
SPLIT = Split(2, 8)
NEW, LENGTHS = [1, 1, 8], [40, 33, 50]

UNCHANGED = {
    "AttentionOp": {"mask", "scale"},
    "PagedAttentionOp": {
        "scale",
        "heads_first",  # a call with other shapes
        "finite",  # whether unwritten slots need a mask; the result is the same
        "split",  # the same information as `starts`
        "local",  # set by kernels
    },
}
"""Fields that are required, or that do not change a result."""


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape, np.float32), dtype)


def slots(rows, queries, keys):
    return jnp.asarray(RNG.integers(0, keys, (rows, queries, 6)), jnp.int32)


def attention():
    """Return a call, and its variants by name."""
    op = AttentionOp(
        normal(1, LENGTH, N, H), normal(1, LENGTH, G, H), normal(1, LENGTH, G, H), mask=Causal(), scale=0.1
    )
    ids = jnp.asarray(np.sort(RNG.integers(1, 5, (1, LENGTH)), axis=1), jnp.int32)
    starts = jnp.arange(LENGTH, dtype=jnp.int32)[None] // 50 * 50
    index = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    masks = {
        "window": Causal() & SlidingWindow(40),
        "chunks": Causal() & Chunks(60),
        "packed chunks": Causal() & Chunks(50, starts, starts),
        "documents": Causal() & Segments(ids, ids),
        "prefix": Causal() | Prefix(jnp.asarray([70], jnp.int32)),
        "hidden prefix": Causal() & (Causal() | Prefix(jnp.asarray([70], jnp.int32))) & SlidingWindow(99),
        "fixed prefix": Causal() | FixedPrefix(70),
        "selected": Causal() & SelectedKeys(jnp.concatenate([slots(1, LENGTH, LENGTH), index[..., None]], axis=-1)),
        "full": Full(),
    }
    return op, {
        **{name: {"mask": mask} for name, mask in masks.items()},
        "softcap": {"softcap": 0.5},
        "bias": {"bias": LinearBias((0.5, 0.25, 0.125, 0.0625))},
        "sinks": {"sinks": jnp.asarray([3.0, 4.0, 5.0, 2.0])},
        "log_sum_exp": {"log_sum_exp": True},
        "query_slots": {"query_slots": index + 20, "key_slots": index},
        "key_slots": {"query_slots": index, "key_slots": index + 20},
    }


def paged():
    """Return a call, and its variants by name."""
    tokens, most = sum(NEW), -(-max(LENGTHS) // SLOTS)
    table = jnp.asarray(RNG.permutation(20)[: 3 * most].reshape(3, most), jnp.int32)
    lengths, starts = jnp.asarray(LENGTHS, jnp.int32), jnp.asarray(np.cumsum([0, *NEW]), jnp.int32)
    operands = normal(tokens, N, H), normal(20, SLOTS, 2 * G, H), table, lengths, starts, jnp.asarray([3], jnp.int32)
    op = PagedAttentionOp(*operands, scale=0.1, finite=True, split=SPLIT)
    ids = jnp.asarray(RNG.integers(0, 2, (tokens, most * SLOTS)), jnp.int32)
    masks = {
        "window": Causal() & SlidingWindow(7),
        "chunks": Causal() & Chunks(9),
        "documents": Causal() & Segments(jnp.ones((tokens, 1), jnp.int32), ids),
        "prefix": Causal() | Prefix(jnp.full((tokens,), 48, jnp.int32)),
        "fixed prefix": Causal() | FixedPrefix(48),
        "selected": Causal() & SelectedKeys(slots(tokens, 1, 30)),
    }
    scales = jnp.abs(normal(20, SLOTS, 2 * G)) + 0.5
    return op, {
        **{name: {"mask": mask} for name, mask in masks.items()},
        "softcap": {"softcap": 0.5},
        "bias": {"bias": LinearBias((0.5, 0.25, 0.125, 0.0625))},
        "sinks": {"sinks": jnp.asarray([3.0, 4.0, 5.0, 2.0])},
        "log_sum_exp": {"log_sum_exp": True},
        "value_size": {"value_size": H // 2},
        "scales": {"scales": scales},
    }


@functools.cache
def variants_of(op):
    return attention() if op is AttentionOp else paged()


OPS = (AttentionOp, PagedAttentionOp)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_optional_field_has_a_variant(op):
    optional = {field.name for field in attrs.fields(op) if field.kw_only} - UNCHANGED[op.__name__]
    assert optional == {name for options in variants_of(op)[1].values() for name in options} - UNCHANGED[op.__name__]


@functools.cache
def reference(op, name=""):
    call, variants = variants_of(op)
    return jax.jit(attrs.evolve(call, **(variants[name] if name else {})).reference)()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_variant_changes_the_result_of_the_reference(op):
    plain = reference(op)
    for name in variants_of(op)[1]:
        other = reference(op, name)
        if name == "log_sum_exp":
            assert len(other) == 2
        elif name == "value_size":
            assert other.shape != plain.shape
        else:
            assert jnp.linalg.norm(other - plain) > 0.02 * jnp.linalg.norm(plain), name


def layouts(op):
    """Return the call in the dtypes and layouts that a kernel may need."""
    yield op
    if isinstance(op, PagedAttentionOp) and op.value_size is None:
        pages = op.pages.reshape(*op.pages.shape[:2], G, 2, H)
        scales = None if op.scales is None else jnp.transpose(op.scales.reshape(20, SLOTS, G, 2), (0, 3, 2, 1))
        yield attrs.evolve(op, pages=jnp.transpose(pages, (0, 3, 2, 1, 4)), heads_first=True, scales=scales)
    if isinstance(op, AttentionOp):
        yield attrs.evolve(op, **{name: getattr(op, name).astype("bfloat16") for name in ("query", "key", "value")})


def supported(implementation, op):
    """Return the kernel's call in the first layout that it supports, or its reasons."""
    platform = implementation.platforms[0] if implementation.platforms else "cpu"
    context = KernelContext(platform=platform, target=TARGETS.get(platform, ""), gradients=False)
    reasons = []
    for call in layouts(op):
        reason = selection.refusal(implementation, call.abstract(), context)
        if reason is None:
            return KernelCall(call.abstract(), context, implementation), call
        reasons.append(reason)
    return None, reasons


KERNELS = [(op, kernel) for op in OPS for kernel in installed_parts.kernels()[op]]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "implementation"), KERNELS, ids=lambda x: x.name)
def test_a_kernel_uses_an_operand_or_refuses_it(op, implementation, monkeypatch):
    monkeypatch.setattr(
        literals.TypedInt, "shape", (), raising=False
    )  # the interpreter reads the shape of constant indices
    plain, variants = variants_of(op)
    refused = []
    for name, options in {"": {}, **variants}.items():
        kernel_call, call = supported(implementation, attrs.evolve(plain, **options))
        if kernel_call is None:
            assert all(isinstance(reason, str) and reason.strip() for reason in call)
            refused.append(name)
        elif kernel_call.unavailable_reason() is not None:
            check_traced(kernel_call, op, call, name)
        else:
            with kernel_call.activate() as kernel:
                result = jax.jit(functools.partial(kernel, call))()
            for actual, expected in zip(jax.tree.leaves(result), jax.tree.leaves(reference(op, name)), strict=True):
                error = jnp.linalg.norm(actual.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
                assert error < (1e-2 if call.query.dtype == jnp.bfloat16 else 1e-4), name
    if "" in refused:
        assert len(refused) == 1 + len(variants)
        assert any("not installed" in reason or "library" in reason for reason in call), call


def check_traced(kernel_call, op, call, name):
    """Check that the operations of a kernel that cannot run on this machine depend on the variant."""

    def traced(call):
        leaves, tree = jax.tree.flatten(attrs.asdict(call, recurse=False))
        arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def run(*values):
            new = dict(zip(arrays, values, strict=True))
            return kernel(attrs.evolve(call, **tree.unflatten([new.get(i, x) for i, x in enumerate(leaves)])))

        with kernel_call.activate() as kernel:
            return jax.make_jaxpr(run)(*[leaves[i] for i in arrays])

    jaxpr = traced(call)
    if name:
        plain = next(c for c in layouts(variants_of(op)[0]) if c.query.dtype == call.query.dtype)
        assert str(jaxpr) != str(traced(plain)), name
    used = {id(v) for equation in live_equations(jaxpr.jaxpr) for v in equation.invars}
    assert all(id(v) in used for v in jaxpr.jaxpr.invars), f"an array has no effect: {name}"


def test_outside_a_program_the_reference_runs():
    for op, kernel in ((PagedAttentionOp, "native"), (AttentionOp, "ring")):
        plain, variants = variants_of(op)
        call = attrs.evolve(plain, **variants["sinks"], **variants["selected"])
        assert choose(call) is REFERENCE_KERNEL
        with pytest.raises(RequestError, match=rf"{kernel}: does not support (mask|sinks)"):
            choose(call, kernel)
