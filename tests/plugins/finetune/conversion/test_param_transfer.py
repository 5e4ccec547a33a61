"""Parameters are transferred between models by their layer, and bridges compute new parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import Run
from axlearn_plugins_finetune.conversion import FRESH, ZERO, load_bridges, transfer_params

QUICK = {"xla_backend_optimization_level": 0}
SIZES = {
    "model.vocab_size": 32,
    "model.decoder.num_layers": 3,
    "model.decoder.hidden_dim": 16,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 24,
}


def models(*with_):
    """Return the toy model, the toy model with features, and the features."""
    plain = resolve("quickstart", set=SIZES)
    resolved = resolve(plain.config, with_=with_)
    return Functional.from_config(plain.config.model), Functional.from_config(resolved.config.model), resolved.features


def logits(functional, params):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)))
    return jax.jit(lambda p: functional.bind(p)(tokens), compiler_options=QUICK)(params)


@pytest.fixture(scope="module")
def params():
    return jax.jit(models()[0].init, compiler_options=QUICK)(jax.random.key(0))


@pytest.mark.slow
def test_layers_keep_their_parameters_in_other_stacks(params):
    """Every layer has different weights, so a misplaced layer changes the result. Nine positions are in every window."""
    plain, interleaved, features = models("interleave:window=16")
    result = transfer_params(params, plain, interleaved, *load_bridges(features)[:1])
    name = "attention.query.weight"
    old = params[f"decoder.layer.{name}"]
    np.testing.assert_array_equal(result[f"decoder.layer.0.{name}"], old[np.array([0, 2])])
    np.testing.assert_array_equal(result[f"decoder.layer.1.{name}"], old[np.array([1])])
    np.testing.assert_allclose(logits(interleaved, result), logits(plain, params), atol=1e-5)
    back = transfer_params(result, interleaved, plain)
    assert back.keys() == params.keys()
    assert all(np.array_equal(back[p], params[p]) for p in params)


def test_variables_go_with_their_layers():
    experts = "moe:num_experts=4,router={type: sigmoid-router}"
    source, target = models(experts)[1], models(experts, "interleave:window=16")[1]
    name = "feed_forward.router.bias"
    assert source.variables.keys() == {f"decoder.layer.{name}"}
    tensors = {**source.abstract, **source.variables}
    values = {p: np.random.default_rng(0).normal(size=s.shape).astype(s.dtype) for p, s in tensors.items()}
    result = transfer_params(values, source, target)
    assert result.keys() == {**target.abstract, **target.variables}.keys()
    old = values[f"decoder.layer.{name}"]
    np.testing.assert_array_equal(result[f"decoder.layer.0.{name}"], old[np.array([0, 2])])
    np.testing.assert_array_equal(result[f"decoder.layer.1.{name}"], old[np.array([1])])
    back = transfer_params(result, target, source)
    assert all(np.array_equal(back[p], values[p]) for p in values)


@pytest.mark.slow
def test_several_features_at_once(params):
    with_ = ["interleave:window=16", "moe:num_experts=3,every=2,shared_experts=1", "lora:rank=2,target=model.**"]
    plain, target, features = models(*with_)
    usable, reasons = load_bridges(features)
    result = transfer_params(params, plain, target, usable, reasons=reasons)
    assert {p: (x.shape, x.dtype) for p, x in result.items()} == {
        p: (s.shape, s.dtype) for p, s in target.abstract.items()
    }
    assert any("lora_a" in p and np.asarray(x).any() for p, x in result.items())
    np.testing.assert_allclose(logits(target, result), logits(plain, params), rtol=1e-4, atol=1e-5)


def test_a_bridge_says_how_a_parameter_begins():
    plain, target, _ = models()
    query, norm = "decoder.layer.attention.query.weight", "decoder.norm.weight"
    values = {p: np.full(s.shape, 7, s.dtype) for p, s in plain.abstract.items() if p not in (query, norm)}
    answers = {query: ZERO, norm: FRESH}
    result = transfer_params(values, plain, target, (lambda path, *_: answers.get(path),))
    assert not result[query].any()
    assert (result[norm] == 1).all()
    assert (result["decoder.layer.feed_forward.up.weight"] == 7).all()
    with pytest.raises(CheckpointError, match=f"missing: {query}"):
        transfer_params(values, plain, target)


def test_what_cannot_be_carried_over_says_which_feature_is_why(params):
    plain, latent, features = models("mla", "interleave")
    usable, reasons = load_bridges(features)
    with pytest.raises(CheckpointError) as error:
        transfer_params(params, plain, latent, usable, reasons=reasons)
    assert "mla: it computes keys and values from a short latent" in str(error.value)
    assert "missing: decoder.layer.0.attention.down.weight" in str(error.value)
    assert "fix: remove mla" in str(error.value)


def test_going_on_with_another_layout_names_the_feature_that_made_it(tmp_path):
    (tmp_path / "config.yaml").write_text(ax.resolve("quickstart").to_yaml(), "utf-8")
    with pytest.raises(CheckpointError, match="contains a run with a different config") as error:
        ax.train("quickstart", with_=["mla"], run_dir=tmp_path)
    assert "latent:LatentAttention' (set by feature mla (axlearn-plugins-transformer" in str(error.value)
    assert "`axlearn convert` creates a new run from this one, or explains why it cannot" in str(error.value)


@pytest.mark.slow
def test_the_command_converts_a_run(tmp_path):
    small = {"input.batch_size": 8, "input.sequence_length": 32, "evaluators": {}, "model.decoder.hidden_dim": 32}
    old, new = tmp_path / "old", tmp_path / "new"
    ax.train("quickstart", set={**SIZES, **small, "model.vocab_size": 2048}, steps=3, run_dir=old)

    def call(*args):
        return CliRunner().invoke(cli, ["convert", str(old), *args])

    result = call(str(new), "--with", "interleave:window=64", "--with", "ema", "--set", "max_steps=2")
    assert result.exit_code == 0, result.output
    before, after = Run(old).weights(), Run(new).weights()
    assert after.step == 0
    assert after.extra["data"] == before.extra["data"]
    np.testing.assert_array_equal(
        after.read()["decoder.layer.0.attention.key.weight"],
        before.read()["decoder.layer.attention.key.weight"][np.array([0, 2])],
    )
    assert ax.train(f"{new}/config.yaml", run_dir=new).step == 2
    refused = call(str(tmp_path / "no"), "--with", "mla")
    assert refused.exit_code == 2
    assert "mla: it computes keys" in refused.output
    assert not (tmp_path / "no").exists()
    assert "already exists" in call(str(new)).output


@pytest.mark.slow
def test_heads_of_multi_token_prediction_are_new_and_the_model_stays(params):
    plain, target, features = models("multi-token-prediction:depth=2")
    usable, reasons = load_bridges(features)
    result = transfer_params(params, plain, target, usable, reasons=reasons)
    assert result.keys() == target.abstract.keys()
    assert all(np.array_equal(result[path], x) for path, x in params.items())
    first, second = (result[f"mtp.{k}.projection.weight"] for k in (0, 1))
    assert np.asarray(first).any()
    assert not np.array_equal(first, second)
