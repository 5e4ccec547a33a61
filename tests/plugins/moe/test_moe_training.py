import jax
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose import compose

TOY = {
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 32,
    "model.vocab_size": 64,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
    "max_steps": 60,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
}


def trained(with_, steps, **settings):
    """Return loss, cross-entropy and maximum expert load per step of a toy quickstart on one repeated text."""
    config = ax.resolve("quickstart", with_=[with_], set={**TOY, **settings}).check().config
    program = compose(config, jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 64, (4, 33)).astype(np.int32)
    batch = program.put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    state, losses = program.init(0), []
    for _ in range(steps):
        state, values = program.train_step(state, batch)
        losses.append({k: float(v) for k, v in values.items()})
    return state, losses


@pytest.mark.slow
def test_a_sigmoid_router_learns_and_balances_without_a_loss():
    state, losses = trained(
        "moe:num_experts=4,top_k=1,router={type: sigmoid-router}", 40, **{"model.decoder.num_layers": 1}
    )
    assert losses[-1]["loss"] < 0.5 * losses[0]["loss"]
    assert losses[-1].keys().isdisjoint({"cross_entropy", "router_bias"})  # no auxiliary loss
    bias = state.variables["decoder.layer.feed_forward.router.bias"]
    assert 0 < float(abs(bias).max()) <= 0.0401
    assert np.abs(np.asarray(bias) * 1000 - np.round(np.asarray(bias) * 1000)).max() < 1e-3  # steps of one size


@pytest.mark.slow
def test_a_softmax_router_learns_and_the_loss_balances_it():
    _, free = trained("moe:num_experts=4,top_k=1,router={type: softmax-router, load_balance: 0.0}", 60)
    _, losses = trained("moe:num_experts=4,top_k=1,router={type: softmax-router, load_balance: 0.1}", 60)
    assert losses[-1]["cross_entropy"] < 0.5 * losses[0]["cross_entropy"]
    assert losses[-1]["expert_load_max"] < 1.5
    assert losses[-1]["expert_load_max"] < free[-1]["expert_load_max"]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["llama2-7b", "llama2-70b", "llama3-8b"])
def test_large_experiments_can_be_planned_with_experts(experiment):
    config = ax.resolve(experiment, with_=["moe:num_experts=8,top_k=2"]).config
    model = compose(config, jax.devices()).functional
    decoder = config.model.decoder
    shape = (decoder.num_layers, 8, decoder.layer.feed_forward.hidden_dim, decoder.hidden_dim)
    assert model.abstract["decoder.layer.feed_forward.down.weight"].shape == shape
    assert model.axes["decoder.layer.feed_forward.down.weight"] == ("layers", "experts", "mlp", "embed")
