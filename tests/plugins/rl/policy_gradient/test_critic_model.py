"""A critic that is a model of its own: its values, where its gradients go, its initial weights and its checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import patch
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import Run
from axlearn_core.train.objective import ObjectiveWeights
from axlearn_core.train.step import TrainingFunctions
from axlearn_plugins_rl.policy_gradient.critic_model import CriticModel
from axlearn_plugins_rl.policy_gradient.generalized_advantages import GeneralizedAdvantages
from axlearn_plugins_rl.policy_gradient.policy_loss import PolicyGradient
from axlearn_testing import ObjectiveSuite
from support import cli_runs, rollout_runs
from support.rollout_batches import random_batch, sequences_of

SMALL = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 16,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.attention.num_kv_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
}
CRITIC = "objective.critic.values."
ESTIMATOR = GeneralizedAdvantages.Config(values=CriticModel.Config(), gamma=0.9, decay=0.7, coefficient=0.5)
OBJECTIVE = PolicyGradient.Config(critic=ESTIMATOR)


def program(objective=OBJECTIVE):
    cfg = resolve("quickstart", set={**SMALL, "mesh.shape": {}}).config
    return compose(patch(cfg, {"objective": objective}), jax.devices()[:1])


class Case:
    """An objective with a critic, a state in which the critic and the policy differ, and its batch."""

    def __init__(self):
        self.trainer, self.batch, rng = program(), random_batch(packed=True), np.random.default_rng(3)
        state = self.trainer.init(0)
        self.params = {p: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for p, x in state.params.items()}
        self.variables = state.variables
        functions = TrainingFunctions(self.trainer.functional, None, self.trainer.trained)
        loss = lambda params: functions.loss(ModelWeights(params, self.variables), self.batch)  # noqa: E731
        self._run = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(self, **changes):
        """Return (loss, summaries, gradients) with some parameters replaced."""
        (loss, report), grads = jax.device_get(self._run({**self.params, **changes}))
        return loss, report, grads

    def critic_arrays(self):
        """Return the parameters of the critic's model by their paths in the model."""
        prefix = f"{CRITIC}model."
        return {p.removeprefix(prefix): x for p, x in self.params.items() if p.startswith(prefix)}

    def values(self):
        """Compute the values by hand, float64 [R, S]."""
        inputs = {n: self.batch[n] for n in ("tokens", "positions", "segment_ids")}
        hidden, _ = self.trainer.functional.bind(self.critic_arrays()).hidden_states(inputs)
        head = np.float64(self.params[f"{CRITIC}head.weight"])[:, 0]
        return np.float64(hidden) @ head + np.float64(self.params[f"{CRITIC}head.bias"])[0]


@pytest.fixture(scope="module")
def case():
    return Case()


def value_terms(case, values, targets):
    """Return the mean over targets of the loss of the values, and that of the values themselves."""
    at = case.batch["weights"] > 0
    loss = 0.5 * ESTIMATOR.coefficient * (values - targets) ** 2
    return loss[at].mean(), values[at].mean()


def returns(case, values):
    """Compute the returns of GAE by hand, float64 [R, S]."""
    result = np.zeros(values.shape)
    for row, at in sequences_of(case.batch):
        running, following = 0.0, 0.0
        for t in reversed(at):
            error = case.batch["rewards"][row, t] + ESTIMATOR.gamma * following - values[row, t]
            running = error + ESTIMATOR.gamma * ESTIMATOR.decay * running
            following = values[row, t]
            result[row, t] = running + values[row, t]
    return result


class Stub(nnx.Module):
    """A model whose hidden states are a product of the tokens. It remembers the names of its inputs."""

    def __init__(self):
        self.weight = nnx.Param(jnp.float32([1.0, -2.0]))

    def hidden_states(self, batch):
        self.names = frozenset(batch)
        return jnp.float32(batch["tokens"])[..., None] * self.weight[None, None] / 64, None


class StubCritic(CriticModel):
    """A critic around a stub."""

    def __init__(self):
        self.model, self.head = Stub(), lambda x: x.sum(-1)


def test_it_reads_the_inputs_of_the_model_and_no_hidden_states():
    critic, batch = StubCritic(), random_batch()
    values = critic.predict("unused", batch)
    np.testing.assert_allclose(values, -batch["tokens"] / 64)
    assert critic.model.names == {"tokens", "targets", "weights", "segment_ids", "positions"}


def test_its_arrays_start_as_copies_of_the_policy_and_are_trained():
    trained = program().trained
    copies = {p for p in trained.abstract if p.startswith(f"{CRITIC}model.")}
    assert copies == set(trained.copies)
    assert {p.removeprefix(f"{CRITIC}model.") for p in copies} == set(trained.model.abstract)
    assert trained.fixed == ()
    assert {f"{CRITIC}head.weight", f"{CRITIC}head.bias"} <= set(trained.abstract)


@pytest.mark.slow
def test_a_new_state_and_one_with_other_weights_copy_them():
    trainer = program()
    state = trainer.init(0)
    other = {p: x + 1 for p, x in state.params.items() if not p.startswith(CRITIC)}
    head = np.asarray(state.params[f"{CRITIC}head.weight"])
    begun = trainer.begin(1, state.replace(params={**state.params, **other}))
    np.testing.assert_array_equal(begun.params[f"{CRITIC}head.weight"], head)
    for params in (trainer.init(0).params, begun.params):
        for path in trainer.trained.model.abstract:
            np.testing.assert_array_equal(params[f"{CRITIC}model.{path}"], params[path], err_msg=path)


@pytest.mark.slow
def test_values_and_gradients_are_those_of_a_hand_computation(case):
    values = case.values()
    targets = returns(case, values)
    loss, mean = value_terms(case, values, targets)
    value, report, grads = case.run()
    np.testing.assert_allclose(report["value"], mean, rtol=1e-5)
    np.testing.assert_allclose(report["value_loss"], loss / ESTIMATOR.coefficient, rtol=1e-5)
    np.testing.assert_allclose(value, report["policy_loss"] + loss, rtol=1e-5)
    at = case.batch["weights"] > 0
    errors = ESTIMATOR.coefficient * (values - targets) / at.sum()  # the derivative of the loss by each value
    np.testing.assert_allclose(grads[f"{CRITIC}head.bias"][0], errors[at].sum(), rtol=1e-4)
    inputs = {n: case.batch[n] for n in ("tokens", "positions", "segment_ids")}
    hidden, _ = case.trainer.functional.bind(case.critic_arrays()).hidden_states(inputs)
    expected = np.einsum("rs,rsd->d", errors * at, np.float64(hidden))
    np.testing.assert_allclose(grads[f"{CRITIC}head.weight"][:, 0], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_no_gradient_crosses_between_the_critic_and_the_policy(case):
    """Advantages reach the policy, but the loss of the values does not, and the loss of the policy does not reach the critic."""
    before = case.run()[2]
    policy = {p for p in before if not p.startswith(CRITIC)}
    critic = {p for p in before if p.startswith(CRITIC) and ".model.decoder.head." not in p}
    assert all(np.abs(before[p]).max() > 0 for p in policy | critic)
    embedding = "decoder.embedding.weight"
    moved = case.run(**{embedding: case.params[embedding] * 1.1})[2]
    assert all(np.array_equal(moved[p], before[p]) for p in critic), (
        "the policy's loss or hidden states reach the critic"
    )
    bias = f"{CRITIC}head.bias"
    shifted = case.run(**{bias: case.params[bias] + 1})[2]
    assert not any(np.array_equal(shifted[p], before[p]) for p in policy), "advantages depend on the values"
    other = program(patch(OBJECTIVE, {"critic.coefficient": 5.0}))
    functions = TrainingFunctions(other.functional, None, other.trained)
    loss = lambda params: functions.loss(ModelWeights(params, case.variables), case.batch)[0]  # noqa: E731
    scaled = jax.device_get(jax.jit(jax.grad(loss))(case.params))
    for path in policy:
        np.testing.assert_allclose(scaled[path], before[path], rtol=1e-5, atol=1e-8, err_msg=path)
    for path in critic:
        np.testing.assert_allclose(scaled[path], 10 * before[path], rtol=1e-4, atol=1e-6, err_msg=path)


def test_another_vocabulary_is_refused():
    model = resolve("quickstart", set={**SMALL, "model.vocab_size": 80}).config.model
    with pytest.raises(
        ConfigError, match=r"different vocabularies\n *got: 80\n *expected: 64, which is model.vocab_size"
    ):
        program(patch(OBJECTIVE, {"critic.values.model": model, "critic.values.weights": "runs/critic"}))


def test_a_critic_of_another_size_needs_weights():
    model = resolve("quickstart", set={**SMALL, "model.decoder.hidden_dim": 32}).config.model
    with pytest.raises(ConfigError, match="cannot start with the weights of the trained model"):
        program(patch(OBJECTIVE, {"critic.values.model": model}))


@pytest.mark.slow
class TestCriticObjective(ObjectiveSuite):
    config = OBJECTIVE
    model = patch(
        resolve("quickstart", set=SMALL).config.model,
        {
            "decoder.hidden_dim": 32,
            "decoder.layer.attention.num_heads": 8,
            "decoder.layer.attention.num_kv_heads": 8,
        },
    )
    options = {"critic.gamma": 0.5, "critic.decay": 0.5, "critic.coefficient": 0.1}  # noqa: RUF012

    def batch(self):
        return random_batch()


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    """A run of a reward model, a task with the same tokenizer, and the settings that both share."""
    folder = tmp_path_factory.mktemp("critic")
    pairs = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no"} for i in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    shared = (
        "model.vocab_size=2048",
        "model.decoder.hidden_dim=64",
        "input.tokenizer={type: byte-tokenizer}",
        "input.sequence_length=16",
    )
    run = folder / "reward"
    more = ("--with", f"reward-model:data={folder}/pairs.jsonl")
    cli_runs.axlearn(*cli_runs.arguments(run, steps=3, settings=shared, more=more))
    return folder, run, rollout_runs.write_sums(folder), shared


def ppo_arguments(run, rewarded, *, steps, settings=(), **options):
    """Return the arguments of a run whose critic starts from the reward model."""
    _, critic, task, shared = rewarded
    values = {
        "critic": critic,
        "critic_learning_rate": 0.002,
        "batch_size": 4,
        "group_size": 2,
        "max_tokens": 4,
    } | options
    feature = f"ppo:task={task}," + ",".join(f"{name}={value}" for name, value in values.items())
    shared = (*shared, "loop.policy.engine.runner.mode=parity", "checkpointer.every_steps=2", *settings)
    return cli_runs.arguments(run, steps=steps, settings=shared, more=("--with", feature, "--with", "batch-invariant"))


@pytest.mark.slow
def test_a_run_starts_from_a_reward_model_and_resumes(rewarded):
    folder, critic, _, _ = rewarded
    whole, parts = folder / "whole", folder / "parts"
    cli_runs.axlearn(*ppo_arguments(whole, rewarded, steps=4))
    for steps in (2, 4):
        cli_runs.axlearn(*ppo_arguments(parts, rewarded, steps=steps))
    assert rollout_runs.curves(parts) == rollout_runs.curves(whole)
    trainer = compose(Run(whole).config, jax.devices()[:1])
    state = ObjectiveWeights.open(trainer).load(trainer.init(0))
    weights = Run(critic).weights()
    for path, value in weights.read().items():
        np.testing.assert_array_equal(state.params[f"{CRITIC}model.{path}"], value, err_msg=path)
    np.testing.assert_array_equal(state.params[f"{CRITIC}head.weight"], weights.read_objective()["head.weight"])
    assert not np.array_equal(state.params["decoder.embedding.weight"], weights.read()["decoder.embedding.weight"])


@pytest.mark.slow
def test_a_critic_with_another_tokenizer_is_refused(rewarded):
    other = ("input.tokenizer={type: tokenizer-json, builtin: python-2k}",)
    result = cli_runs.axlearn(*ppo_arguments(rewarded[0] / "refused", rewarded, steps=1, settings=other), code=2)
    assert "input.tokenizer is not the tokenizer of" in result.stderr


@pytest.mark.slow
def test_a_frozen_critic_is_refused_and_adapters_leave_it_trained(rewarded):
    frozen, adapted = (
        ppo_arguments(rewarded[0] / name, rewarded, steps=2, critic_learning_rate="null")
        for name in ("frozen", "adapted")
    )
    result = cli_runs.axlearn(*frozen, "--with", "freeze:pattern=objective.critic.**", code=2)
    assert "the critic is not trained" in result.stderr
    cli_runs.axlearn(*adapted, "--with", "lora:rank=2")
    before, after = (Run(run).weights() for run in (rewarded[1], rewarded[0] / "adapted"))
    name = "decoder.layer.attention.query.weight"
    assert not np.array_equal(after.read_objective()[f"critic.values.model.{name}"], before.read()[name])
