"""Tests of the objective and the feature. Run `pytest` after installing the package."""

import jax
import jax.numpy as jnp
import numpy as np

import axlearn_core as ax
from axlearn_plugins_my_objective.objective import ConfidencePenalty
from axlearn_testing import ObjectiveSuite

SMALL = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
    "input.batch_size": 8,
    "input.sequence_length": 32,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
    "evaluators": {},
}


class TestConfidencePenalty(ObjectiveSuite):
    config = ConfidencePenalty.Config(weight=0.5)
    model = ax.resolve("quickstart", set=SMALL).config.model

    def batch(self):
        tokens = np.arange(8 * 32, dtype=np.int32).reshape(8, 32)
        return {"tokens": tokens, "targets": (tokens * 7 + 1) % 512, "weights": np.ones((8, 32), np.float32)}


def test_the_loss_is_its_formula():
    cfg = ax.resolve("quickstart", with_=["confidence-penalty:weight=0.5"], set=SMALL).config
    program = ax.compose(cfg, jax.devices()[:1])
    model, objective = program.model(program.init(0)), program.trained.bind_objective({}, {})
    tokens = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones((2, 32))}
    loss, summaries = objective.loss(model, batch, None)
    p = np.asarray(jax.nn.softmax(model(tokens)), np.float64)
    entropy = -(p * np.log(p)).sum(-1).mean()
    np.testing.assert_allclose(summaries["entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(loss, model.loss(batch)[0] - 0.5 * entropy, rtol=1e-5)


def test_the_feature_wraps_the_objective_once():
    once = ax.resolve("quickstart", with_=["confidence-penalty"]).config
    again = ax.resolve(once, with_=["confidence-penalty:weight=0.3"]).config
    assert again.objective == ConfidencePenalty.Config(weight=0.3)
    assert {c.path.partition(".")[0] for c in ax.diff(ax.resolve("quickstart").config, once)} == {"objective"}


def test_it_trains(tmp_path):
    result = ax.train("quickstart", with_=["confidence-penalty"], set=SMALL, steps=3, run_dir=tmp_path / "run")
    assert result.step == 3
    assert '"entropy"' in (tmp_path / "run" / "metrics.jsonl").read_text()
