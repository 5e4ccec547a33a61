"""ALiBi against the authors' definition (arXiv 2108.12409), through both attention kernels and a cache."""

import math

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.nn.layer import Context
from axlearn_plugins_transformer import attention
from axlearn_plugins_transformer.attention_variants.alibi import Alibi, slopes
from axlearn_plugins_transformer.cache_spec import empty_cache
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.masks import Causal, Prefix, SlidingWindow


def published(n):
    """`get_slopes` of the authors' repository."""

    def of_power(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return of_power(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_power(closest) + published(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 32, 40, 64])
def test_slopes_are_the_published_ones(heads):
    np.testing.assert_allclose(slopes(heads), published(heads), rtol=1e-12)


def test_slopes_of_eight_heads_are_halves():
    assert slopes(8) == tuple(2.0**-i for i in range(1, 9))


def reference(q, k, v, slopes, scale, softcap=None):
    """By loops over rows, heads and queries, in float64."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        s = scale * k[b, : t + 1, n // group] @ q[b, t, n]
        s = softcap * np.tanh(s / softcap) if softcap else s
        s = s - slopes[n] * (t - np.arange(t + 1))
        w = np.exp(s - s.max())
        out[b, t, n] = (w / w.sum()) @ v[b, : t + 1, n // group]
    return out


def operands(length, heads=4, kv_heads=2, size=8, value_size=8):
    shapes = [(2, length, heads, size), (2, length, kv_heads, size), (2, length, kv_heads, value_size)]
    return [jnp.asarray(np.random.default_rng(i).standard_normal(s), jnp.float32) for i, s in enumerate(shapes)]


@pytest.mark.slow_cases("None-xla-blocked-256")
@pytest.mark.parametrize(("kernel", "length"), [("xla", 20), ("xla-blocked", 256)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_op_adds_the_bias(kernel, length, softcap):
    q, k, v = operands(length, value_size=5)
    run = jax.jit(
        lambda q, k, v: AttentionOp(q, k, v, mask=Causal(), scale=0.3, softcap=softcap, bias=LinearBias(slopes(4))).run(
            kernel
        )
    )
    np.testing.assert_allclose(run(q, k, v), reference(q, k, v, slopes(4), 0.3, softcap), rtol=1e-4, atol=2e-5)


def test_blocked_equals_reference_in_gradients(normal):
    args = operands(256)
    weigh = normal(2, 256, 4, 8, seed=9)

    def grads(kernel):
        def total(q, k, v):
            mask = Causal() & SlidingWindow(150)
            return jnp.sum(AttentionOp(q, k, v, mask=mask, scale=0.3, bias=LinearBias(slopes(4))).run(kernel) * weigh)

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*args)

    for actual, expected in zip(grads("xla-blocked"), grads("xla"), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_a_bias_counts_the_distance_to_both_sides():
    bias = LinearBias((1.0, 0.5)).materialize((0, 3), (0, 3))
    np.testing.assert_array_equal(bias[0, 0], [[0, -1, -2], [-1, 0, -1], [-2, -1, 0]])
    np.testing.assert_array_equal(bias[0, 1], np.asarray(bias[0, 0]) / 2)
    slots = jnp.asarray([[5], [9]]), jnp.asarray([[4, 5]])
    np.testing.assert_array_equal(LinearBias((1.0,)).materialize((0, 1), (0, 2), *slots)[:, 0, 0], [[-1, 0], [-5, -4]])
    assert LinearBias((1.0,)).describe() == "linearbias"


CFG = attention.Attention.Config(num_heads=4, position=Alibi.Config())


@pytest.mark.fast_cases("4")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_layer_with_a_cache_is_the_layer_without(layer, run, kv_heads, normal):
    module = layer(attrs.evolve(CFG, num_kv_heads=kv_heads))
    x = normal(2, 8, 24, seed=1)
    expected, _ = run(module, x, Context())
    q, k, v = (np.einsum("bsd,dnh->bsnh", x, part.weight[...]) for part in (module.query, module.key, module.value))
    by_hand = np.einsum("bsnh,nhd->bsd", reference(q, k, v, slopes(4), 6**-0.5), module.output.weight[...])
    np.testing.assert_allclose(expected, by_hand, rtol=1e-4, atol=1e-4)
    cache, parts = empty_cache(module.cache_spec(), 2, 12), []
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 8)):
        slots = jnp.arange(start, end, dtype=jnp.int32)[None]
        y, cache = run(module, x[:, start:end], Context(positions=slots, slots=slots), cache)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=1e-4, atol=1e-5)


def test_documents_in_a_row_have_distances_of_their_own(layer, run, normal):
    module = layer(CFG)
    x = normal(1, 7, 24, seed=1)
    y, _ = run(module, x, Context(segment_ids=jnp.asarray([[1, 1, 1, 2, 2, 2, 2]])))
    np.testing.assert_allclose(y[:, 3:], run(module, x[:, 3:], Context())[0], rtol=1e-4, atol=1e-5)


def test_a_prefix_is_seen_in_both_directions(layer, run, normal):
    module = layer(CFG)
    x = normal(1, 4, 24, seed=1)
    prefix = jnp.asarray([4], jnp.int32)
    actual, _ = run(module, x, Context(prefix=prefix))
    mirrored, _ = run(module, x[:, ::-1], Context(prefix=prefix))
    np.testing.assert_allclose(actual, mirrored[:, ::-1], rtol=1e-4, atol=1e-5)
    assert Prefix(prefix).describe() == "prefix"


def test_kernels_are_told_of_the_bias():
    q, k, v = operands(3)
    plain = AttentionOp(q, k, v, mask=Causal(), scale=1.0)
    biased = attrs.evolve(plain, bias=LinearBias(slopes(4)))
    assert plain.options()["bias"] is None
    assert biased.options()["bias"] == "linearbias"
    assert biased != plain
