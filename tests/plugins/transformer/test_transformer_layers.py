import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.initializers import Constant, Normal, VarianceScaling
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.nn.linear import Linear
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.embedding import Embedding, Head
from axlearn_plugins_transformer.feed_forward import GatedFeedForward, PlainFeedForward
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS
from axlearn_plugins_transformer.norm import LayerNorm, RMSNorm
from axlearn_plugins_transformer.transformer import TransformerLayer


def build(cfg, dtype="float32", params="float32", **offered):
    return cfg.build(rngs=nnx.Rngs(0), precision=Precision(params, dtype), **offered)


def normal(*shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


def weights(layer):
    """Return the parameters as arrays of NumPy. JAX would compile every step of a formula."""
    return {".".join(map(str, k)): np.asarray(v.get_value()) for k, v in nnx.to_flat_state(nnx.state(layer))}


@nnx.jit
def run(layer, *args):
    return layer(*args)


def test_linear_contracts_all_input_dimensions():
    layer = build(Linear.Config(bias=True), input_dims=(4, 3), output_dims=(5,), axes=("heads", "head_dim", "embed"))
    layer.bias[...] = normal(5, seed=3)
    x = normal(2, 7, 4, 3)
    expected = x.reshape(2, 7, 12) @ layer.weight[...].reshape(12, 5) + layer.bias[...][None, None]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert layer.weight.out_sharding == ("heads", "head_dim", "embed")
    assert layer.bias.out_sharding == ("embed",)


@pytest.mark.parametrize(("mode", "fan"), [("fan_in", 64 * 3), ("fan_out", 8 * 50), ("fan_avg", (64 * 3 + 8 * 50) / 2)])
@pytest.mark.parametrize("distribution", ["normal", "truncated_normal", "uniform"])
def test_initializers_scale_by_the_fan_of_the_matrix(mode, fan, distribution):
    init = VarianceScaling(scale=2.0, mode=mode, distribution=distribution)
    layer = build(Linear.Config(init=init), input_dims=(64, 3), output_dims=(8, 50), axes=(None,) * 4)
    assert float(jnp.var(layer.weight[...])) == pytest.approx(2 / fan, rel=0.05)


def test_plain_initializers():
    assert float(jnp.std(Normal(stddev=0.3).build()(jax.random.key(0), (100, 100), "float32"))) == pytest.approx(
        0.3, rel=0.05
    )
    assert (Constant(value=2.0).build()(jax.random.key(0), (3,), jnp.bfloat16) == jnp.full(3, 2, jnp.bfloat16)).all()


def test_embedding_looks_up_scales_and_is_a_head():
    tokens = jnp.asarray([[3, 0, 9]])
    layer = build(Embedding.Config(scale=True), vocab_size=10, dim=16)
    np.testing.assert_allclose(layer(tokens), 4 * layer.weight[...][tokens])
    np.testing.assert_array_equal(layer.head_weight(), layer.weight[...].T)
    table = build(Embedding.Config(), vocab_size=1000, dim=64).weight[...]
    assert float(jnp.var(table)) == pytest.approx(1 / 64, rel=0.05)
    assert build(Head.Config(), vocab_size=10, dim=16).head_weight().shape == (16, 10)


def test_rms_norm():
    layer = build(RMSNorm.Config(eps=1e-3, offset=1.0), dim=6)
    layer.weight[...] = normal(6, seed=1)
    x = np.asarray(normal(2, 3, 6), np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * (1 + np.asarray(layer.weight[...]))
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias):
    layer = build(LayerNorm.Config(eps=1e-3, bias=bias), dim=6)
    layer.weight[...] = normal(6, seed=1)
    x = np.asarray(normal(2, 3, 6), np.float64)
    expected = (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * np.asarray(layer.weight[...])
    )
    if bias:
        layer.bias[...] = normal(6, seed=2)
        expected = expected + np.asarray(layer.bias[...])
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


def test_layer_norm_with_a_scale_around_zero_and_without_a_scale():
    x = normal(2, 3, 6)
    plain = build(LayerNorm.Config(), dim=6)
    around_zero = build(LayerNorm.Config(offset=1.0), dim=6)
    assert not np.any(around_zero.weight[...])
    np.testing.assert_array_equal(around_zero(x), plain(x))
    around_zero.weight[...] = normal(6, seed=1)
    plain.weight[...] = 1 + normal(6, seed=1)
    np.testing.assert_allclose(around_zero(x), plain(x), rtol=1e-6)
    without = build(LayerNorm.Config(scale=False, bias=False), dim=6)
    assert not weights(without)
    np.testing.assert_array_equal(without(x), build(LayerNorm.Config(), dim=6)(x))


@pytest.mark.slow_cases("gelu", "silu")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_layers(activation):
    x, act = np.asarray(normal(2, 3, 8)), jax.jit(ACTIVATIONS[activation])
    gated = build(GatedFeedForward.Config(hidden_dim=12, activation=activation), input_dim=8)
    w = weights(gated)
    expected = (np.asarray(act(x @ w["gate.weight"])) * (x @ w["up.weight"])) @ w["down.weight"]
    np.testing.assert_allclose(run(gated, x), expected, rtol=1e-5, atol=1e-6)
    plain = build(PlainFeedForward.Config(activation=activation), input_dim=8)
    w = weights(plain)
    assert w["up.weight"].shape == (8, 32)
    expected = np.asarray(act(x @ w["up.weight"])) @ w["down.weight"]
    np.testing.assert_allclose(run(plain, x), expected, rtol=1e-5, atol=1e-6)


def test_the_default_hidden_size_follows_the_width():
    for width, hidden in ((384, 1024), (200, 640)):
        layer = nnx.eval_shape(lambda width=width: build(GatedFeedForward.Config(), input_dim=width))
        assert layer.up.weight.shape == (width, hidden)


def test_grouped_query_attention_equals_attention_with_repeated_keys():
    x = normal(2, 10, 32)
    few = build(Attention.Config(num_heads=4, num_kv_heads=2), input_dim=32)
    many = build(Attention.Config(num_heads=4), input_dim=32)
    for name in ("query", "key", "value", "output"):
        value = np.asarray(getattr(few, name).weight[...])
        value = np.repeat(value, 2, axis=1) if name in ("key", "value") else value
        getattr(many, name).weight.set_value(jax.device_put(value))
    np.testing.assert_allclose(run(few, x, Context())[0], run(many, x, Context())[0], rtol=1e-5, atol=1e-6)


def test_attention_parts():
    """QK-norm before the scores, the score scale, the soft cap and the window, against plain formulas."""
    cfg = Attention.Config(
        num_heads=2, head_dim=6, qk_norm=RMSNorm.Config(eps=1e-3), scale=0.7, softcap=2.0, window=3
    )  # fmt: skip
    layer = build(cfg, input_dim=8)
    layer.query_norm.weight.set_value(normal(6, seed=5))
    x = np.asarray(normal(1, 9, 8))
    w = weights(layer)
    q, k, v = (np.einsum("bsd,dnh->bnsh", x, w[f"{n}.weight"]) for n in ("query", "key", "value"))
    norm = lambda t: t / np.sqrt(np.mean(t**2, -1, keepdims=True) + 1e-3)  # noqa: E731
    q, k = norm(q) * w["query_norm.weight"][None, None, None], norm(k)
    s = 2.0 * np.tanh(0.7 * np.einsum("bnth,bnsh->bnts", q, k) / 2.0)
    at = np.arange(9)
    visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 3)
    p = np.where(visible[None, None], np.exp(s), 0)
    p = p / p.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bnsh,nhd->btd", p, v, w["output.weight"])
    np.testing.assert_allclose(run(layer, x, Context())[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases("settings1-post", "settings0-pre", "settings4-scaled", "settings5-scaled-sum")
def rms(x):
    """Normalize vectors as an RMS norm with the weight 1 does."""
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "pre"),
        ({"norm": None, "post_norm": RMSNorm.Config()}, "post"),
        ({"post_norm": RMSNorm.Config()}, "both"),
        ({"norm": None, "post_norm": RMSNorm.Config(), "norm_sum": True}, "sum"),
        ({"post_norm": RMSNorm.Config(), "residual_multiplier": 0.25}, "scaled"),
        ({"post_norm": RMSNorm.Config(), "norm_sum": True, "residual_multiplier": 0.25}, "scaled-sum"),
    ],
)
def test_blocks_normalise_where_they_are_told_to(settings, expected):
    layer = build(TransformerLayer.Config(attention=Attention.Config(num_heads=2), **settings), input_dim=8)
    x = np.asarray(normal(1, 5, 8))
    halves = lambda y: run(layer.attention, y, Context())[0], lambda y: run(layer.feed_forward, y)
    for half in halves:
        x = {
            "pre": lambda x, f: x + f(rms(x)),
            "post": lambda x, f: x + rms(f(x)),
            "both": lambda x, f: x + rms(f(rms(x))),
            "sum": lambda x, f: rms(x + f(x)),
            "scaled": lambda x, f: x + 0.25 * rms(f(rms(x))),
            "scaled-sum": lambda x, f: rms(x + 0.25 * f(rms(x))),
        }[expected](x, lambda y, half=half: np.asarray(half(y)))
    np.testing.assert_allclose(run(layer, normal(1, 5, 8), Context())[0], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", ["attention", "feed_forward"])
def test_a_layer_may_have_one_half(missing):
    half = {"attention": Attention.Config(num_heads=2), "feed_forward": PlainFeedForward.Config()} | {missing: None}
    layer = build(TransformerLayer.Config(post_norm=RMSNorm.Config(), **half), input_dim=8)
    x = normal(1, 5, 8)
    y = run(layer.feed_forward, rms(x)) if missing == "attention" else run(layer.attention, rms(x), Context())[0]
    np.testing.assert_allclose(run(layer, x, Context())[0], x + rms(y), rtol=1e-5, atol=1e-5)
    assert not [path for path in weights(layer) if path.startswith(missing)]
    assert (layer.cache_spec() == ()) == (missing == "attention")


def test_a_layer_to_which_an_alternate_gives_no_half_is_an_error():
    with pytest.raises(ConfigError, match="a layer needs attention, a feed-forward layer, or both"):
        build(TransformerLayer.Config(attention=None, feed_forward=None), input_dim=8)


@pytest.mark.slow
def test_dtypes_come_from_the_parent_unless_a_layer_sets_its_own():
    cfg = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), feed_forward=PlainFeedForward.Config(dtype="float32")
    )
    layer = build(cfg, dtype="bfloat16", params="float16", input_dim=8)
    assert {v.dtype for v in weights(layer).values()} == {jnp.dtype("float16")}
    x = normal(1, 4, 8).astype(jnp.bfloat16)
    assert layer.attention(x, Context())[0].dtype == jnp.bfloat16
    assert layer.feed_forward(x).dtype == jnp.float32


@pytest.mark.parametrize(
    ("cfg", "path", "hint"),
    [
        (Linear.Config(dtype="bfloat61"), "dtype", "did you mean: bfloat16"),
        (RMSNorm.Config(param_dtype="int8"), "param_dtype", "expected: one of float32"),
        (Attention.Config(num_heads=6, num_kv_heads=4), "num_kv_heads", "one of 1, 2, 3, 6"),
        (TransformerLayer.Config(attention=Attention.Config(num_heads=1), norm_sum=True), "norm_sum", "post_norm"),
        (TransformerLayer.Config(attention=None, feed_forward=None), "", "attention or feed_forward"),
    ],
)
def test_wrong_configs_are_named(cfg, path, hint):
    with pytest.raises(ConfigError) as error:
        check(cfg)
    assert [p.path for p in error.value.problems] == [path]
    assert hint in str(error.value)


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(RequestError, match="num_heads=3 does not divide the width 8"):
        build(Attention.Config(num_heads=3), input_dim=8)
