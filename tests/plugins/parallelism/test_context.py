"""Attention over a sharded sequence equals the reference, including gradients, for every kind of mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.flops import inner_jaxprs
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import RequestError
from axlearn_core.kernels import selection
from axlearn_core.nn import sharding
from axlearn_plugins_parallelism import context
from axlearn_plugins_parallelism.blockwise import Scores
from axlearn_plugins_parallelism.zigzag import Parts
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import (
    Causal,
    Chunks,
    FixedPrefix,
    Full,
    Mask,
    Prefix,
    Segments,
    SelectedKeys,
    SlidingWindow,
)

RNG = np.random.default_rng(0)
IDS = jnp.asarray(np.sort(RNG.integers(1, 4, (2, 24)), axis=1), jnp.int32)
OWN = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32)[None, :, None], (2, 24, 1))
CHOSEN = jnp.concatenate([jnp.asarray(RNG.integers(0, 24, (2, 24, 5)), jnp.int32), OWN], axis=-1)
STARTS = jnp.stack([jnp.arange(24, dtype=jnp.int32) // size * size for size in (3, 5)])
CASES = {
    "causal": (Causal(), {}),
    "window": (Causal() & SlidingWindow(5), {"softcap": 2.0}),
    "packed": (Causal() & SlidingWindow(9) & Segments(IDS, IDS), {}),
    "prefix": (Causal() | Prefix(jnp.asarray([3, 20], jnp.int32)), {}),
    "chunks": (Causal() & Chunks(7) & SelectedKeys(CHOSEN), {}),
    "packed chunks": (Causal() & Chunks(5, STARTS, STARTS), {}),
    "fixed prefix": (Causal() | FixedPrefix(9) | Prefix(jnp.asarray([2], jnp.int32)), {}),
    "alibi": (Causal(), {"bias": LinearBias((0.5, 0.25, 0.125, 0.0625))}),
    "full": (Full(), {}),
}
METHODS = ("ring", "context-all-gather", "context-all-to-all")


def operands(groups, length=24):
    shapes = ((2, length, 4, 8), (2, length, groups, 8), (2, length, groups, 6))
    return [jnp.asarray(RNG.normal(size=s), jnp.float32) for s in shapes]


def both(kernel, case, shape, groups=2, rules=None, length=24):
    """Return outputs and gradients of the reference and of a kernel on a mesh."""
    mask, options = CASES[case]
    inputs = operands(groups, length)
    probe = jnp.asarray(RNG.normal(size=(2, length, 4, 6)), jnp.float32)

    def run(q, k, v, kernel):
        out = AttentionOp(q, k, v, mask=mask, scale=0.3, **options).run(kernel)
        return jnp.sum(out * probe), out

    def on(kernel, config):
        layout = Layout(make_mesh(config, jax.devices()[: int(np.prod(list(config.shape.values())))]), config)

        def call(*args):
            with sharding.logical_rules(layout.mesh, layout.rules), selection.use(selection.Selection()):
                return jax.value_and_grad(functools.partial(run, kernel=kernel), (0, 1, 2), has_aux=True)(*args)

        (_, out), grads = jax.jit(call)(*inputs)
        return [out, *grads]

    return on("xla", Mesh(shape={"fsdp": 1})), on(kernel, Mesh(shape=shape, rules=rules or {}))


def agree(*args, **kwargs):
    for expected, actual in zip(*both(*args, **kwargs), strict=True):
        assert np.linalg.norm(actual - expected) <= 2e-6 * np.linalg.norm(expected)


def test_a_ring_of_four_sees_what_one_device_sees():
    agree("ring", "packed", {"seq": 4, "tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"seq": 2, "data": 2, "tensor": 2}, {"seq": 4}], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", METHODS)
def test_every_method_and_mask(kernel, case, shape):
    agree(kernel, case, shape)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", METHODS)
def test_fewer_key_heads_than_devices_that_share_the_heads(kernel):
    agree(kernel, "causal", {"seq": 2, "tensor": 2}, groups=1)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", METHODS)
def test_parts_of_odd_length_are_not_cut(kernel):
    agree(kernel, "causal", {"seq": 4}, length=12)


@pytest.mark.slow
def test_queries_in_several_tiles(monkeypatch):
    monkeypatch.setattr(context, "TILE", 3)
    agree("ring", "packed", {"seq": 2})
    agree("context-all-gather", "window", {"seq": 2})


def largest_loop_result(kernel, case, length=256):
    """Return the size of the largest array that a loop of the training step of two layers produces, over that of the queries."""
    mask, options = CASES[case]
    mask = jax.tree.map(lambda x: x[:, jnp.arange(length) % 24] if x.ndim > 1 else x, mask)
    query, key, value = operands(2, length)
    config = Mesh(shape={"seq": 4})
    layout = Layout(make_mesh(config, jax.devices()[:4]), config)

    @jax.checkpoint
    def layer(x, scale):
        return x * scale + jnp.mean(AttentionOp(x, key, value, mask=mask, scale=0.3, **options).run(kernel)), None

    def loss(scales, query):
        return jnp.sum(jax.lax.scan(layer, query, scales)[0])

    with sharding.logical_rules(layout.mesh, layout.rules), selection.use(selection.Selection()):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones(2), query).jaxpr

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield from (v.aval.size for v in eqn.outvars)
            for inner in inner_jaxprs(eqn):
                yield from sizes(inner)

    return max(sizes(jaxpr)) / query.size


@pytest.mark.slow_cases("packed chunks", "fixed prefix")
@pytest.mark.parametrize("case", CASES)
def test_masks_are_not_kept_for_all_pairs_of_tiles(case):
    """Masks follow from positions, so JAX could compute all of them ahead of the layers. The layers' inputs are the largest."""
    assert largest_loop_result("ring", case) <= 2
    assert largest_loop_result("context-all-gather", case) <= 2


def test_masks_that_are_kept_would_be_seen(monkeypatch):
    monkeypatch.setattr(context, "_bind_start", lambda tiles: tiles)
    assert largest_loop_result("ring", "causal") > 4


def test_a_sequence_that_the_axis_does_not_divide_is_rejected():
    with pytest.raises(RequestError, match="sequence length 10 is not divisible by the mesh axes seq"):
        both("ring", "causal", {"seq": 4}, length=10)
    with pytest.raises(RequestError, match="4 heads are not divisible by the mesh axes seq"):
        both("context-all-to-all", "causal", {"seq": 8})


def test_a_mask_with_arrays_that_nobody_knows_is_refused():
    @jax.tree_util.register_pytree_node_class
    class Odd(Mask):
        def tree_flatten(self):
            return (jnp.zeros(3),), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls()

    x = jax.ShapeDtypeStruct((1, 8, 2, 4), "float32")
    op = AttentionOp(x, x, x, mask=Causal() & Odd(), scale=1.0)
    with pytest.raises(RequestError, match="unknown which arrays of the mask 'odd' belong to queries"):
        Scores(op)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_halves_in_zigzag_balance_a_causal_mask(devices):
    parts = Parts.from_axes(("seq",), devices, 4)
    starts = [parts.start(d) for d in range(devices)]
    assert sorted(int(s) for pair in starts for s in pair) == list(range(0, 4 * devices, 2))
    work = {
        int(sum(s // 2 + 1 for s in pair)) for pair in starts
    }  # number of key halves that each half of queries sees
    assert work == {2 * devices + 1}
    for half in range(2):
        route = parts._route(half)
        assert sorted(to for _, to in route) == list(range(devices)), "every device gets one half of each"
        for at, to in route:
            assert (2 * at + half) * parts.size in [int(s) for s in starts[to]]
