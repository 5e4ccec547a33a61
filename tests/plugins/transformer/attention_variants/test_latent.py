"""Latent attention against a transcription of the paper's equations (arXiv 2405.04434, section 2.1 and appendix C)."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.nn.linear import Linear
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.attention_variants.alibi import Alibi
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention
from axlearn_plugins_transformer.cache_spec import empty_cache

PAPER = LatentAttention.Config(
    num_heads=3,
    head_dim=8,
    rope_head_dim=4,
    value_head_dim=6,
    kv_rank=10,
    query_rank=14,
    position=RotaryEmbedding.Config(),
)
VARIANTS = {
    "paper": {},
    "no query latent": {"query_rank": None},
    "alibi, window": {"position": Alibi.Config(), "window": 4},
    "no position, no norm, softcap, biases": {
        "position": None, "norm": None, "softcap": 3.0, "key": Linear.Config(bias=True), "value": Linear.Config(bias=True),
    },
}  # fmt: skip


def variant(name):
    return attrs.evolve(PAPER, **VARIANTS[name])


def rotated(x, position, theta=10000.0):
    """Rotate one vector: pair (i, i + n / 2) by position * theta ** (-2i / n)."""
    half = len(x) // 2
    angle = position * theta ** (-2 * jnp.arange(half) / len(x))
    a, b = x[:half], x[half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)])


def rms(x, weight):
    return x / jnp.sqrt(jnp.mean(x * x) + 1e-6) * weight


def paper(w, h):
    """u_t for one row h [S, D], token by token and head by head, with the paper's names."""
    S, n = len(h), w["query.weight"].shape[1]
    c_Q = [rms(h[t] @ w["query_down.weight"], w["query_norm.weight"]) for t in range(S)]  # (37)
    q_C = [[c_Q[t] @ w["query.weight"][:, i] for i in range(n)] for t in range(S)]  # (38)
    q_R = [[rotated(c_Q[t] @ w["query_rope.weight"][:, i], t) for i in range(n)] for t in range(S)]  # (39)
    c_KV = [rms(h[t] @ w["down.weight"], w["norm.weight"]) for t in range(S)]  # (41)
    k_C = [[c_KV[t] @ w["key.weight"][:, i] for i in range(n)] for t in range(S)]  # (42)
    k_R = [rotated(h[t] @ w["key_rope.weight"], t) for t in range(S)]  # (43)
    v_C = [[c_KV[t] @ w["value.weight"][:, i] for i in range(n)] for t in range(S)]  # (45)
    rows = []
    for t in range(S):
        u = 0.0
        for i in range(n):
            q = jnp.concatenate([q_C[t][i], q_R[t][i]])  # (40)
            k = [jnp.concatenate([k_C[j][i], k_R[j]]) for j in range(t + 1)]  # (44)
            a = jax.nn.softmax(jnp.stack([q @ k[j] for j in range(t + 1)]) / jnp.sqrt(float(len(q))))
            o = jnp.sum(jnp.stack([a[j] * v_C[j][i] for j in range(t + 1)]), axis=0)  # (46)
            u = u + o @ w["output.weight"][i]  # (47)
        rows.append(u)
    return jnp.stack(rows)


def weights(module):
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(module))}


def test_in_an_encoder_a_query_sees_what_comes_after_it(layer, normal, run):
    x = np.asarray(normal(2, 5, 24))
    later = x + (np.arange(5) == 4)[None, :, None].astype(np.float32)
    for causal in (True, False):
        module = layer(attrs.evolve(PAPER, causal=causal))
        a, b = (run(module, h, Context())[0][:, 0] for h in (x, later))
        assert np.array_equal(a, b) == causal


@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_paper(layer, normal):
    module = layer(attrs.evolve(PAPER, num_heads=2))
    x, cotangent = normal(2, 1, 3, 24, seed=1)
    graph, state = nnx.split(module)

    def ours(state, x):
        y, cache = nnx.merge(graph, state)(x, Context())
        assert cache is None
        return jnp.sum(y * cotangent), y

    def theirs(w, x):
        y = jnp.stack([paper(w, row) for row in x])
        return jnp.sum(y * cotangent), y

    found_grads, actual = jax.jit(jax.grad(ours, argnums=(0, 1), has_aux=True))(state, x)
    quick = {"xla_backend_optimization_level": 0}
    grads, expected = jax.jit(jax.grad(theirs, argnums=(0, 1), has_aux=True), compiler_options=quick)(
        weights(module), x
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    found_by_path = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(found_grads[0])}
    assert found_by_path.keys() == grads[0].keys()
    for path, grad in grads[0].items():
        np.testing.assert_allclose(found_by_path[path], grad, atol=1e-5 * np.linalg.norm(grad), err_msg=path)
    np.testing.assert_allclose(found_grads[1], grads[1], atol=1e-5 * np.linalg.norm(grads[1]))


@pytest.mark.fast_cases("alibi, window")
@pytest.mark.parametrize("name", VARIANTS)
def test_with_a_cache_is_without(layer, run, name, normal):
    module = layer(variant(name))
    x = np.asarray(normal(2, 8, 24, seed=1))
    expected, _ = run(module, x, Context())
    cache = empty_cache(module.cache_spec(), 2, 12)
    assert {leaf.shape for leaf in jax.tree.leaves(cache)} == {(2, 12, 10 + 4)}  # d_c + d_h^R numbers per token
    parts = []
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 8)):
        slots = jnp.arange(start, end, dtype=jnp.int32)[None]
        y, cache = run(module, x[:, start:end], Context(positions=slots, slots=slots), cache)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_of_different_length_share_a_cache(layer, run, normal):
    module = layer(PAPER)
    x = normal(2, 6, 24, seed=1)
    slots = jnp.arange(6, dtype=jnp.int32)[None]
    _, cache = run(module, x, Context(positions=slots, slots=slots), empty_cache(module.cache_spec(), 2, 8))
    last = normal(2, 1, 24, seed=2)
    ends = jnp.asarray([[6], [4]], jnp.int32)  # the last two of the second row were padding
    y, _ = run(module, last, Context(positions=ends, slots=ends), cache)
    for row, end in ((0, 6), (1, 4)):
        alone, _ = run(module, jnp.concatenate([x[row, :end], last[row]])[None], Context())
        np.testing.assert_allclose(y[row, 0], alone[0, -1], rtol=1e-4, atol=1e-5)


def shapes_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from shapes_in(inner)


def test_decoding_makes_no_keys_or_values_of_the_heads(layer):
    module = layer(PAPER)
    slots = jnp.asarray([[7]], jnp.int32)

    def largest(tokens, cache):
        x = jnp.zeros((1, tokens, 24))
        at = slots if tokens == 1 else slots - 1 + jnp.arange(tokens, dtype=jnp.int32)[None]
        result = jax.make_jaxpr(lambda x, c: module(x, Context(positions=at, slots=at), c))(x, cache)
        return {s for s in shapes_in(result.jaxpr) if len(s) == 4 and 500 in s and 3 in s and s[-1] != 500}

    cache = empty_cache(module.cache_spec(), 1, 500)
    assert (1, 500, 3, 8) in largest(2, cache)
    assert not largest(1, cache)


class Doubled(Linear):
    """A projection that is not a `Linear`."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_projections_of_other_kinds_are_absorbed_too(layer, run, normal):
    other = Doubled.Config(bias=True)
    module = layer(attrs.evolve(PAPER, key=other, value=other))
    x = np.asarray(normal(1, 5, 24, seed=1))
    expected, _ = run(module, x, Context())
    cache, slots = empty_cache(module.cache_spec(), 1, 5), jnp.arange(5, dtype=jnp.int32)[None]
    _, cache = run(module, x[:, :4], Context(positions=slots[:, :4], slots=slots[:, :4]), cache)
    y, _ = run(module, x[:, 4:], Context(positions=slots[:, 4:], slots=slots[:, 4:]), cache)
    np.testing.assert_allclose(y[:, 0], expected[:, 4], rtol=1e-4, atol=1e-5)


def test_default_sizes_are_the_ratios_of_the_paper():
    cfg = LatentAttention.Config(num_heads=128, head_dim=128)  # DeepSeek-V2: 512, 64, 128, 1536 of 5120
    module = nnx.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0), precision=Precision(), input_dim=5120))
    shapes = {path: value.shape for path, value in weights(module).items()}
    assert shapes["down.weight"] == (5120, 512)
    assert shapes["query_down.weight"] == (5120, 1536)
    assert shapes["key_rope.weight"] == (5120, 64)
    assert shapes["value.weight"] == (512, 128, 128)
    assert all(len(v.out_sharding) == len(v.shape) for _, v in nnx.to_flat_state(nnx.state(module)))


def test_documents_in_a_row_do_not_see_one_another(layer, run, normal):
    module = layer(PAPER)
    x = np.asarray(normal(1, 7, 24, seed=1))
    ids, positions = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]]), jnp.asarray([[0, 1, 2, 0, 1, 2, 3]])
    y, _ = run(module, x, Context(positions=positions, segment_ids=ids))
    np.testing.assert_allclose(y[:, :3], run(module, x[:, :3], Context())[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y[:, 3:], run(module, x[:, 3:], Context())[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="leave out segment_ids"):
        jax.eval_shape(lambda: module(x, Context(segment_ids=ids), empty_cache(module.cache_spec(), 1, 8)))


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(RequestError, match="num_heads=5 does not divide the width 24"):
        LatentAttention.Config(num_heads=5).build(rngs=nnx.Rngs(0), precision=Precision(), input_dim=24)
