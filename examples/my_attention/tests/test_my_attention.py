"""Tests of the layer and the feature. Run `pytest` after installing the package."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import axlearn_core as ax
from axlearn_core.extend import Context, Precision
from axlearn_plugins_my_attention.layer import GatedAttention
from axlearn_plugins_transformer.attention import Attention
from axlearn_testing import FeatureSuite, LayerSuite

SMALL = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
    "input.batch_size": 8,
    "input.sequence_length": 32,
    "evaluators": {},
}


class TestGatedAttention(LayerSuite):
    """Test shapes, dtypes, gradients, axes, meshes, checkpoints, remat and compilation."""

    config = GatedAttention.Config(num_heads=2)


class TestUseGatedAttention(FeatureSuite):
    """Test that the feature is idempotent and commutes with every installed feature."""

    name = "gated-attention"
    options = ""


def test_the_layer_is_its_formula():
    sizes = {"input_dim": 8, "rngs": nnx.Rngs(0), "precision": Precision()}
    gated = GatedAttention.Config(num_heads=2).build(**sizes)
    plain = Attention.Config(num_heads=2).build(input_dim=8, rngs=nnx.Rngs(0), precision=Precision())
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    expected = plain(x, Context())[0] * jax.nn.sigmoid(x @ gated.gate.weight[...])
    np.testing.assert_allclose(gated(x, Context())[0], expected, rtol=1e-6)


def test_the_feature_keeps_what_the_attention_had():
    plain = ax.resolve("quickstart").config.model.decoder.layer.attention
    gated = ax.resolve("quickstart", with_=["gated-attention"]).config.model.decoder.layer.attention
    assert isinstance(gated, GatedAttention.Config)
    assert (gated.num_heads, gated.position) == (plain.num_heads, plain.position)


def test_a_cache_continues_what_the_whole_row_computes():
    config = ax.resolve("quickstart", with_=["gated-attention"], set={**SMALL, "model.dtype": "float32"}).config
    model = config.model.build(rngs=nnx.Rngs(0))
    tokens = jnp.arange(2, 10, dtype=jnp.int32)[None]
    whole = model(tokens)
    begin, cache = model(tokens[:, :5], cache=model.init_cache(1, 8))
    end, _ = model(tokens[:, 5:], cache=cache)
    np.testing.assert_allclose(jnp.concatenate([begin, end], axis=1), whole, rtol=1e-4, atol=1e-4)


def test_it_trains_and_generates(tmp_path):
    result = ax.train("quickstart", with_=["gated-attention"], set=SMALL, steps=3, run_dir=tmp_path / "run")
    assert result.step == 3
    assert isinstance(ax.load(tmp_path / "run").generate("def ", max_tokens=4), str)
