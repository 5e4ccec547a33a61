import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError
from axlearn_core.run import bind_weights
from axlearn_plugins_moe.feature import MoE
from axlearn_plugins_moe.routers import SigmoidRouter
from axlearn_plugins_moe.upcycle import upcycle
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.feed_forward import GatedFeedForward, PlainFeedForward
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

QUICK = {"xla_backend_optimization_level": 0}


def model(feed_forward=None):
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), feed_forward=feed_forward or GatedFeedForward.Config(hidden_dim=24)
    )
    return CausalLM.Config(vocab_size=32, decoder=Decoder.Config(num_layers=3, hidden_dim=16, layer=layer))


def logits(functional, params):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)))
    return jax.jit(lambda p: bind_weights(functional, p)(tokens), compiler_options=QUICK)(params)


@pytest.fixture(scope="module")
def dense():
    functional = Functional.from_config(model())
    params = jax.jit(functional.init, compiler_options=QUICK)(jax.random.key(0))
    return functional, params, logits(functional, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(MoE(num_experts=4), marks=pytest.mark.slow),
        MoE(num_experts=4, every=2, dense_layers=1, shared_experts=1),
        pytest.param(MoE(num_experts=3, top_k=3, router=SigmoidRouter.Config()), marks=pytest.mark.slow),
    ],
)
def test_the_upcycled_model_computes_what_the_dense_one_did(feature, dense):
    source, params, expected = dense
    target = Functional.from_config(feature.apply(model()))
    result = upcycle(params, source, target)
    assert {p: (v.shape, v.dtype) for p, v in result.items()} == {
        p: (s.shape, s.dtype) for p, s in {**target.abstract, **target.variables}.items()
    }
    np.testing.assert_allclose(logits(target, result), expected, rtol=1e-5, atol=1e-5)
    again = upcycle(result, target, target)  # layers with experts keep them
    assert all((again[p] == result[p]).all() for p in result)


@pytest.mark.slow
def test_plain_layers_too():
    source = Functional.from_config(model(PlainFeedForward.Config(hidden_dim=24)))
    params = jax.jit(source.init, compiler_options=QUICK)(jax.random.key(0))
    target = Functional.from_config(MoE(num_experts=2, top_k=2).apply(model(PlainFeedForward.Config(hidden_dim=24))))
    np.testing.assert_allclose(
        logits(target, upcycle(params, source, target)), logits(source, params), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            MoE(hidden_dim=32).apply(model()),
            r"differs: decoder.layer.feed_forward.down.weight: \[3, 8, 24, 16\] in the old",
        ),
        (
            MoE().apply(model(PlainFeedForward.Config(hidden_dim=24))),
            "not in the new model: decoder.layer.feed_forward.gate",
        ),
        (model(PlainFeedForward.Config(hidden_dim=20)), "differs: decoder.layer.feed_forward.down.weight"),
    ],
)
def test_a_model_that_cannot_be_made_of_it(target, message, dense):
    source, params, _ = dense
    with pytest.raises(CheckpointError, match=message):
        upcycle(params, source, Functional.from_config(target))


TINY = ["model.decoder.num_layers=2", "model.decoder.hidden_dim=32", "input.batch_size=8", "input.sequence_length=32"]


@pytest.mark.slow
def test_the_command_makes_a_run_that_goes_on(tmp_path):
    dense, experts = str(tmp_path / "dense"), str(tmp_path / "experts")
    settings = [*TINY, "evaluators={}", "model.decoder.layer.feed_forward.hidden_dim=48"]
    before = ax.train("quickstart", set=settings, steps=30, run_dir=dense)

    def call(*args):
        return CliRunner().invoke(cli, ["upcycle", *args])

    result = call(dense, experts, "--with", "moe:num_experts=4,router={type: sigmoid-router}", "--set", "max_steps=10")
    assert result.exit_code == 0, result.output
    after = ax.train(f"{experts}/config.yaml", run_dir=experts)
    assert after.step == 10
    first = json.loads((tmp_path / "experts/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] < 7.0  # a fresh model begins at log(2048) = 7.6
    assert before.step == 30
    again = call(dense, experts)
    assert again.exit_code == 2
    assert "already exists" in again.output
    assert call(str(tmp_path / "nothing"), experts).exit_code == 2
    assert call(dense, str(tmp_path / "new"), "--step", "7").exit_code == 2
    assert not (tmp_path / "new").exists()
