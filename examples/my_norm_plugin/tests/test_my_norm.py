"""Tests of the layer and the feature. Run `pytest` after installing the package."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Precision
from axlearn_plugins_my_norm.layer import DynamicTanh


def test_the_layer_is_its_formula():
    layer = DynamicTanh.Config(alpha=0.8).build(dim=4, rngs=nnx.Rngs(0), precision=Precision())
    x = jnp.linspace(-3, 3, 24).reshape(2, 3, 4)
    np.testing.assert_allclose(layer(x), np.tanh(0.8 * x), rtol=1e-6)


def test_the_feature_replaces_every_norm_and_touches_nothing_else():
    plain = ax.resolve("quickstart").config
    config = ax.resolve("quickstart", with_=["dynamic-tanh:alpha=0.8"]).config
    assert {c.path.rpartition("norm.")[0] for c in ax.diff(plain, config)} == {"model.decoder.", "model.decoder.layer."}
    assert config.model.decoder.layer.norm == DynamicTanh.Config(alpha=0.8)


def test_a_model_without_norms_refuses_it():
    cfg = ax.patch(ax.resolve("quickstart").config, {"model.decoder.layer.norm": None, "model.decoder.norm": None})
    with pytest.raises(RequestError, match="RMSNorm"):
        ax.resolve(cfg, with_=["dynamic-tanh"])


def test_it_trains(tmp_path):
    small = {
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_dim": 32,
        "model.decoder.layer.feed_forward.hidden_dim": 64,
        "input.batch_size": 8,
        "input.sequence_length": 32,
        "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
        "evaluators": {},
    }
    result = ax.train("quickstart", with_=["dynamic-tanh"], set=small, steps=3, run_dir=tmp_path / "run")
    assert result.step == 3
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "type: rms-norm" in ax.resolve("quickstart").to_yaml()
    assert "type: rms-norm" not in config
    assert "type: dynamic-tanh" in config
