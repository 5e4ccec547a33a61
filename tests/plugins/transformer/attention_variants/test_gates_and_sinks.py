import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import get
from axlearn_core.errors import RequestError
from axlearn_core.nn.initializers import Constant
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.alternate import layer_configs
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.norm import RMSNorm

SLOT = "model.decoder.layer.attention"
X = jax.random.normal(jax.random.key(1), (2, 5, 8))


def build(**settings):
    return Attention.Config(num_heads=2, **settings).build(rngs=nnx.Rngs(0), input_dim=8, precision=Precision())


def test_sinks_are_logits_without_values():
    layer = build(sinks=Constant(value=0.0))
    layer.sinks.set_value(jnp.asarray([0.5, -1.0]))
    query, key, value = layer.project(X, Context())
    scores = jnp.where(jnp.tri(5, dtype=bool), jnp.einsum("bqnh,bknh->bnqk", query, key) / 2, -jnp.inf)
    sinks = jnp.broadcast_to(layer.sinks[...][:, None, None], (2, 2, 5, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    expected = layer.output(jnp.einsum("bnqk,bknh->bqnh", weights, value))
    np.testing.assert_allclose(layer(X, Context())[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("per", "axes"), [("element", "bsnh"), ("head", "bsn")])
def test_the_gate_multiplies_the_weighted_sums(per, axes):
    gated, plain = build(output_gate=Linear.Config(), output_gate_per=per), build()
    context_vectors, _ = plain.attend(plain.scores(*plain.project(X, Context()), Context()), Context())
    gate = jax.nn.sigmoid(jnp.einsum(f"bsd,d{axes[2:]}->{axes}", X, gated.output_gate.weight[...]))
    expected = plain.output(jnp.einsum(f"bsnh,{axes}->bsnh", context_vectors, gate))
    np.testing.assert_allclose(gated(X, Context())[0], expected, rtol=1e-5, atol=1e-6)


def test_a_norm_may_cover_all_heads_and_come_last():
    layer = build(qk_norm=RMSNorm.Config(), qk_norm_over="all_heads", qk_norm_last=True)
    query, key, _ = layer.project(X, Context())
    for x in (query, key):
        np.testing.assert_allclose(jnp.mean(x.reshape(2, 5, 8) ** 2, axis=-1), 1.0, rtol=1e-3)
    assert layer.query_norm.weight.shape == (8,)


def test_features_add_the_parts_and_keep_their_settings():
    features = ["output-gate:per=head", "attention-sinks", "nope:every=2", "interleave:window=8"]
    config = resolve("quickstart", with_=features).config
    attention = get(config, SLOT)
    assert (attention.output_gate, attention.output_gate_per, attention.sinks) == (
        Linear.Config(),
        "head",
        Constant(value=0.0),
    )
    layers = [layer.attention for layer in layer_configs(config.model.decoder.layer, 4)]
    assert [layer.position is None for layer in layers] == [False, True] * 2
    again = resolve(config, with_=["output-gate", "attention-sinks", "nope:every=4"]).config
    assert get(again, SLOT).output_gate_per == "head"
    layers = [layer.attention for layer in layer_configs(again.model.decoder.layer, 8)]
    assert [layer.position is None for layer in layers] == [False, False, False, True] * 2


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["mla", "output-gate"], "output-gate"),
        (["mla", "attention-sinks"], "attention-sinks"),
    ],
)
def test_models_without_the_slot_are_refused(features, message):
    with pytest.raises(RequestError, match=message):
        resolve("quickstart", with_=features)


def test_a_model_without_positions_is_refused():
    config = resolve("quickstart", set=["model.decoder.layer.attention.position=null"]).config
    with pytest.raises(RequestError, match="has no position encoding that nope could remove"):
        resolve(config, with_=["nope"])
