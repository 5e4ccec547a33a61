import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_recurrent.kernels.linear_attention import XLA_CHUNKED, LinearAttentionOp


def make(length, *, element=False, delta=True, decay=1.0, seed=0):
    rng = np.random.default_rng(seed)
    rows, groups, heads, keys, values = 1, 2, 4, 16, 8
    key = rng.normal(size=(rows, length, groups, keys))
    shape = (rows, length, heads, keys) if element else (rows, length, heads)
    operands = (
        rng.normal(size=(rows, length, groups, keys)),
        key / np.linalg.norm(key, axis=-1, keepdims=True),
        rng.normal(size=(rows, length, heads, values)),
        -decay * rng.gamma(1.0, 1.0, shape),
    )
    strength = jnp.asarray(rng.uniform(size=(rows, length, heads)), jnp.float32) if delta else None
    return LinearAttentionOp(*(jnp.asarray(x, jnp.float32) for x in operands), strength=strength, scale=0.25)


def error(result, expected):
    return float(jnp.linalg.norm(result - expected) / jnp.linalg.norm(expected))


@pytest.mark.slow_cases("1.0-*", "0.001-*")
@pytest.mark.parametrize("element", [False, True], ids=["head", "element"])
@pytest.mark.parametrize("decay", [1e-3, 1.0, 100.0])
def test_chunks_equal_the_recurrence(element, decay):
    # With a decay of exp(-100) per token, the products of two chunks would overflow if they were not taken pair by pair.
    op = make(600, element=element, decay=decay)
    expected = jax.jit(lambda: op.reference())()
    result = jax.jit(lambda: XLA_CHUNKED(op))()
    assert error(result.values, expected.values) < 1e-5
    assert error(result.states, expected.states) < 1e-5


@pytest.mark.parametrize("element", [False, True], ids=["head", "element"])
def test_gradients_are_finite_for_decays_of_any_size(element):
    op = make(130, element=element, decay=100.0)
    gradients = jax.jit(jax.grad(lambda g: jnp.sum(XLA_CHUNKED(attrs.evolve(op, decay=g)).values ** 2)))(op.decay)
    assert np.isfinite(gradients).all()


def test_identical_keys_replace_one_another():
    # A token with the strength 1 replaces the value of its key, so only the last value is left.
    op = make(200)
    same = jnp.broadcast_to(op.key[:, :1], op.key.shape)
    op = attrs.evolve(op, key=same, query=same, decay=jnp.zeros_like(op.decay), strength=jnp.ones_like(op.strength))
    assert error(jax.jit(lambda: XLA_CHUNKED(op))().values, op.value * op.scale) < 1e-4


def test_one_token_is_left_to_the_reference():
    context = KernelContext(platform="cpu")
    assert XLA_CHUNKED.supports(make(1), context) == "single tokens have no chunks"
    assert XLA_CHUNKED.supports(make(2), context) is None
