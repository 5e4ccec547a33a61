"""Each preference objective equals its published formula, computed in NumPy from the log-probabilities of the answers."""

import jax
import numpy as np
import pytest

from support import toy_models
from support.objective_formulas import loss, loss_of, moved, program, reference_params, sequence_scores

BETA = 0.3
PAIRS = ("chosen", "rejected")
DATA = {
    "ipo": "data=pairs.jsonl,beta=0.3",
    "orpo": "data=pairs.jsonl,odds_weight=0.3",
    "simpo": "data=pairs.jsonl,beta=0.3,gamma=0.2,label_smoothing=0.1",
    "kto": "data=rows.jsonl,beta=0.3,desirable_weight=0.7,undesirable_weight=1.3",
    "reward-model": "data=pairs.jsonl,center=0.2",
}


@pytest.fixture(scope="module")
def measured():
    """Return a function that returns the loss, the report and the inputs of an objective. It remembers them."""
    results = {}

    def measure(name, **settings):
        key = (name, *settings.items())
        if key not in results:
            trainer = program(f"{name}:{DATA[name]}", **{"objective.loss_chunk": 5, **settings})
            state = moved(trainer)
            (value, report), batch = loss(trainer, state)
            held_out = jax.device_get(trainer.eval_step(state, trainer.put(batch)))
            results[key] = trainer, state, batch, value, report, held_out["loss_sum"] / held_out["weight"]
        return results[key]

    return measure


def lengths(batch, answer):
    return batch[f"{answer}_weights"].sum(1)


def log_ratios(trainer, state, batch, answer):
    params = state.params, reference_params(state)
    policy, reference = (sequence_scores(trainer, p, batch, answer) for p in params)
    return policy - reference


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def assert_rewards(report, chosen, rejected):
    np.testing.assert_allclose(report["reward_chosen"], chosen.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_rejected"], rejected.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_margin"], (chosen - rejected).mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_accuracy"], (chosen > rejected).mean())
    assert report["weight"] == len(chosen)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("per_token", [True, False])
def test_ipo_is_its_formula(per_token, measured):
    settings = {} if per_token else {"objective.per_token": False}
    trainer, state, batch, value, report, held_out = measured("ipo", **settings)
    ratios = [log_ratios(trainer, state, batch, a) / (lengths(batch, a) if per_token else 1) for a in PAIRS]
    expected = ((ratios[0] - ratios[1] - 1 / (2 * BETA)) ** 2).mean()
    np.testing.assert_allclose([value, held_out], expected, rtol=1e-5)
    assert_rewards(report, BETA * ratios[0], BETA * ratios[1])


def test_orpo_is_its_formula(measured):
    trainer, state, batch, value, report, held_out = measured("orpo")
    chosen, rejected = (sequence_scores(trainer, state.params, batch, a) / lengths(batch, a) for a in PAIRS)
    odds = [np.exp(p) / (1 - np.exp(p)) for p in (chosen, rejected)]
    ratio = np.log(odds[0] / odds[1])
    expected = (-chosen - BETA * log_sigmoid(ratio)).mean()
    np.testing.assert_allclose([value, held_out], expected, rtol=1e-5)
    np.testing.assert_allclose(report["nll"], -chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(report["log_odds_ratio"], ratio.mean(), rtol=1e-4, atol=1e-5)
    assert_rewards(report, BETA * chosen, BETA * rejected)


def test_simpo_is_its_formula(measured):
    trainer, state, batch, value, report, held_out = measured("simpo")
    rewards = [BETA * sequence_scores(trainer, state.params, batch, a) / lengths(batch, a) for a in PAIRS]
    margin = rewards[0] - rewards[1] - 0.2
    expected = -(0.9 * log_sigmoid(margin) + 0.1 * log_sigmoid(-margin)).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(held_out, -log_sigmoid(margin).mean(), rtol=1e-5)
    assert_rewards(report, *rewards)


def kto_terms(trainer, state, batch, rows=slice(None)):
    """Return the rewards, the KL estimate and the losses of a KTO batch."""
    ratios = log_ratios(trainer, state, batch, "completion")[rows]
    divergence = max(0.0, log_ratios(trainer, state, batch, "mismatched")[rows].mean())
    desirable = batch["labels"][rows] == 1
    values = 1 / (1 + np.exp(-BETA * np.where(desirable, ratios - divergence, divergence - ratios)))
    return BETA * ratios, divergence, np.where(desirable, 0.7, 1.3) * (1 - values)


def test_kto_is_its_formula(measured):
    trainer, state, batch, value, report, held_out = measured("kto")
    rewards, divergence, losses = kto_terms(trainer, state, batch)
    desirable = batch["labels"] == 1
    np.testing.assert_allclose([value, held_out], losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(report["kl"], divergence, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_desirable"], rewards[desirable].mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["reward_undesirable"], rewards[~desirable].mean(), rtol=1e-4, atol=1e-5)
    assert report["weight"] == toy_models.ROWS


def test_the_kl_of_kto_has_no_gradient(measured):
    """If all rows have the same log-ratio, it equals the KL estimate. Gradients of both would cancel."""
    trainer, state, batch, *_ = measured("kto")
    ratios = log_ratios(trainer, state, batch, "completion")
    best = int(ratios.argmax())
    assert ratios[best] > 0.01
    arrays = ("tokens", "targets", "weights")
    rows = {f"{a}_{n}": batch[f"completion_{n}"][[best] * 16] for a in ("completion", "mismatched") for n in arrays}
    rows["labels"] = np.ones(16, np.float32)
    training_loss = trainer.functions["train"].call.__self__.training_loss
    key = jax.random.key(0)
    loss_and_gradients = jax.jit(
        jax.value_and_grad(lambda params: training_loss(params, state.variables, rows, key)[0])
    )
    value, gradients = loss_and_gradients(state.params)
    np.testing.assert_allclose(value, 0.7 / 2, rtol=1e-5)
    assert max(float(abs(g).max()) for g in gradients.values()) > 1e-3


@pytest.mark.slow
def test_the_reward_model_is_its_formula(measured):
    trainer, state, batch, value, report, held_out = measured("reward-model")

    def hidden(answer):
        rows = {name: batch[f"{answer}_{name}"] for name in ("tokens", "targets", "weights")}
        model = trainer.functional.bind({p: state.params[p] for p in trainer.functional.abstract})
        states = np.asarray(model.hidden_states(rows)[0], np.float64)
        last = [np.flatnonzero(w)[-1] for w in rows["weights"]]
        return states[np.arange(len(last)), last]

    head = np.asarray(state.params["objective.head.weight"], np.float64)[:, 0]
    chosen, rejected = (hidden(a) @ head for a in PAIRS)
    expected = -log_sigmoid(chosen - rejected).mean()
    np.testing.assert_allclose(held_out, expected, rtol=1e-5)
    np.testing.assert_allclose(value, expected + 0.2 * ((chosen + rejected) ** 2).mean(), rtol=1e-5)
    assert_rewards(report, chosen, rejected)


@pytest.mark.fast_cases("kto")
@pytest.mark.parametrize("name", list(DATA))
def test_rows_that_pad_a_batch_do_not_count(name, measured):
    trainer, state, batch, *_ = measured(name)
    count = toy_models.ROWS - 3
    padded = {n: np.concatenate([x[:count], np.zeros_like(x[count:])]) for n, x in batch.items()}
    value, report = loss_of(trainer, state, padded)
    expected, expected_report = loss_of(trainer, state, {n: x[:count] for n, x in batch.items()})
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert report["weight"] == count
    for key, x in report.items():
        np.testing.assert_allclose(x, expected_report[key], rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.slow
def test_with_adapters_the_head_of_a_reward_model_is_trained():
    trainer = program(f"reward-model:{DATA['reward-model']}", "lora:rank=2")
    trained = set(trainer.trained.abstract) - set(trainer.function("train").frozen)
    assert {p for p in trained if not p.endswith(("lora_a", "lora_b"))} == {"objective.head.weight"}
    assert any(p.endswith("lora_b") for p in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ipo", "kto"])
def test_with_adapters_the_reference_needs_no_memory(name):
    trainer = program(f"{name}:{DATA[name]}", "lora:rank=2")
    assert not trainer.trained.frozen
    state = moved(trainer)
    (value, report), batch = loss(trainer, state)
    base = {p: x if not p.endswith("lora_b") else 0 * x for p, x in state.params.items()}

    def ratios(answer):
        return sequence_scores(trainer, state.params, batch, answer) - sequence_scores(trainer, base, batch, answer)

    if name == "ipo":
        margin = ratios("chosen") / lengths(batch, "chosen") - ratios("rejected") / lengths(batch, "rejected")
        expected = ((margin - 1 / (2 * BETA)) ** 2).mean()
    else:
        np.testing.assert_allclose(report["kl"], max(0.0, ratios("mismatched").mean()), rtol=1e-4, atol=1e-5)
        signs = np.where(batch["labels"] == 1, 1, -1)
        values = 1 / (1 + np.exp(-BETA * signs * (ratios("completion") - report["kl"])))
        expected = (np.where(batch["labels"] == 1, 0.7, 1.3) * (1 - values)).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_only_kto_depends_on_the_batch(measured):
    reasons = {name: measured(name)[0].trained.batch_dependence for name in DATA}
    assert {name for name, reason in reasons.items() if reason} == {"kto"}
    assert "KL divergence" in reasons["kto"][0]
