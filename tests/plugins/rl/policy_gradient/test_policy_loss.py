"""The policy-gradient objective against formulas in NumPy, finite differences, and the suite of objectives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import check, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rl.policy_gradient.clips import CispoClip, PpoClip
from axlearn_plugins_rl.policy_gradient.generalized_advantages import GeneralizedAdvantages
from axlearn_plugins_rl.policy_gradient.importance_correction import ImportanceCorrection
from axlearn_plugins_rl.policy_gradient.kl_penalty import KlPenalty
from axlearn_plugins_rl.policy_gradient.loss_means import FixedLengthMean, SequenceMean, TokenMean
from axlearn_plugins_rl.policy_gradient.policy_loss import PolicyGradient, select_drawn
from axlearn_plugins_rl.policy_gradient.ratios import SequenceRatio, TokenRatio
from axlearn_plugins_rl.presets import PRESETS, build_preset
from axlearn_plugins_transformer.token_logprobs import keep_tokens, token_logprobs
from axlearn_testing import ObjectiveSuite
from support.rollout_batches import random_batch, sequences_of


class FixedValues(nnx.Module):
    """A value model whose hidden states are the values."""

    def predict(self, hidden, inputs):
        return hidden


class BareCritic(GeneralizedAdvantages):
    """A critic whose hidden states are the values."""

    def __init__(self, cfg):
        self.cfg, self.values = cfg, FixedValues()


class BareObjective(PolicyGradient):
    """An objective without a model."""

    def __init__(self, cfg):
        self.cfg = cfg
        if cfg.critic is not None:
            self.critic = BareCritic(cfg.critic)


def arrays(batch, seed=1):
    """Return random hidden states (values), log-probabilities, entropies and reference log-probabilities."""
    rng, shape = np.random.default_rng(seed), batch["weights"].shape
    near = batch["rollout_logprobs"] + 0.3 * rng.standard_normal(shape)
    return (
        rng.standard_normal(shape),
        near,
        np.abs(rng.standard_normal(shape)),
        near + 0.4 * rng.standard_normal(shape),
    )


# The formulas, for one sequence at a time. All arguments are float64 [tokens of the sequence].


# `fixed` are the values in places that have no gradient. They equal the others, except in finite differences.


def ratio_formula(cfg, logprobs, rollout, fixed):
    base = rollout if cfg.base == "rollout" else fixed
    if isinstance(cfg, TokenRatio.Config):
        return np.exp(logprobs - base)
    total = np.sum(logprobs) - np.sum(base)
    return np.full(len(logprobs), np.exp(total / len(logprobs) if cfg.normalize else total))


def clip_formula(cfg, ratio, fixed_ratio, advantage, logprob):
    if cfg is None:
        return ratio * advantage
    if isinstance(cfg, CispoClip.Config):
        return min(max(fixed_ratio, cfg.floor), cfg.cap) * advantage * logprob
    value = min(ratio * advantage, min(max(ratio, 1 - cfg.low), 1 + cfg.high) * advantage)
    return max(value, cfg.dual * advantage) if cfg.dual is not None and advantage < 0 else value


def kl_formula(estimator, logprobs, reference):
    q = np.exp(reference - logprobs)
    return {"k1": logprobs - reference, "k2": (logprobs - reference) ** 2 / 2, "k3": q - 1 - np.log(q)}[estimator]


def correction_formula(cfg, fixed, rollout):
    log_weights = fixed - rollout
    weights = np.exp(np.full(len(fixed), log_weights.sum()) if cfg.level == "sequence" else log_weights)
    if cfg.mode == "truncate":
        return np.clip(weights, cfg.low, cfg.high)
    return np.array([w if cfg.low <= w <= cfg.high else 0.0 for w in weights])


def gae_formula(cfg, rewards, values):
    advantages, running, following = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        error = rewards[t] + cfg.gamma * following - values[t]
        running = error + cfg.gamma * cfg.decay * running
        advantages[t], following = running, values[t]
    return advantages


def value_loss_formula(cfg, values, base, returns):
    errors = (values - returns) ** 2
    if cfg.clip is not None:
        errors = np.maximum(errors, (base + np.clip(values - base, -cfg.clip, cfg.clip) - returns) ** 2)
    return 0.5 * cfg.coefficient * errors


def formula(cfg, batch, inputs, fixed=None):
    """Compute the loss in float64, one sequence at a time.

    `inputs` are values, log-probabilities, entropies and reference log-probabilities, [R, S] each.
    """
    terms = []
    fixed_values = batch.get("rollout_values", (fixed or inputs)[0])
    for row, at in sequences_of(batch):
        values, now, entropies, reference, start, base, rollout, advantages, rewards = (
            x[row, at].astype(np.float64)
            for x in (
                *inputs, (fixed or inputs)[1], fixed_values,
                *(batch[name] for name in ("rollout_logprobs", "advantages", "rewards")),
            )
        )  # fmt: skip
        ratios, fixed_ratios = (ratio_formula(cfg.ratio, x, rollout, start) for x in (now, start))
        loss, penalty = -cfg.entropy_bonus * entropies, cfg.penalty
        if penalty is not None and penalty.placement == "reward":
            costs = penalty.coefficient * kl_formula(penalty.estimator, rollout, reference)
            advantages = advantages - np.array([costs[t:].sum() for t in range(len(at))])
            rewards = rewards - costs
        elif penalty is not None:
            factor = ratios if penalty.importance else 1.0
            loss = loss + penalty.coefficient * kl_formula(penalty.estimator, now, reference) * factor
        if cfg.critic is not None:
            advantages = gae_formula(cfg.critic, rewards, base)
            loss = loss + value_loss_formula(cfg.critic, values, base, advantages + base)
        pairs = zip(ratios, fixed_ratios, advantages, now, strict=True)
        objective = np.array([clip_formula(cfg.clip, *x) for x in pairs])
        if cfg.correction is not None:
            objective = objective * correction_formula(cfg.correction, start, rollout)
        terms.append(loss - objective)
    if isinstance(cfg.mean, TokenMean.Config):
        return np.concatenate(terms).mean()
    if isinstance(cfg.mean, SequenceMean.Config):
        return np.mean([term.mean() for term in terms])
    return np.mean([term.sum() / (cfg.mean.length or batch["weights"].shape[1]) for term in terms])


Config = PolicyGradient.Config
CURRENT = TokenRatio.Config(base="current")
CASES = {
    **{name: build_preset(name).objective for name in PRESETS},
    "unclipped": Config(clip=None, entropy_bonus=0.1),
    "dual": Config(clip=PpoClip.Config(low=0.1, high=0.3, dual=1.5)),
    "k2": Config(penalty=KlPenalty.Config(estimator="k2", coefficient=0.3)),
    "k1-importance": Config(penalty=KlPenalty.Config(estimator="k1", importance=True)),
    "k3-reward": Config(penalty=KlPenalty.Config(placement="reward", coefficient=0.3)),
    "truncated": Config(ratio=CURRENT, correction=ImportanceCorrection.Config(high=1.1, low=0.9)),
    "masked": Config(ratio=CURRENT, correction=ImportanceCorrection.Config(mode="mask", high=1.2, low=0.8)),
    "sequence-masked": Config(
        ratio=CURRENT, correction=ImportanceCorrection.Config(level="sequence", mode="mask", high=1.5)
    ),
    "cispo-floor": Config(ratio=SequenceRatio.Config(), clip=CispoClip.Config(cap=1.1, floor=0.9)),
    "critic": Config(critic=GeneralizedAdvantages.Config(gamma=0.9, decay=0.7, coefficient=0.5)),
    "clipped-critic": Config(critic=GeneralizedAdvantages.Config(clip=0.2), mean=FixedLengthMean.Config(length=5)),
}


def batch_for(cfg, seed=0, packed=False):
    batch = random_batch(seed, packed=packed)
    if cfg.critic is not None and cfg.critic.clip is not None:
        rng = np.random.default_rng(seed)
        batch["rollout_values"] = rng.standard_normal(batch["weights"].shape).astype(np.float32)
    return batch


def check_formula(cfg, seed, packed):
    batch = batch_for(cfg, seed, packed)
    inputs = arrays(batch, seed + 1)
    loss, _ = BareObjective(cfg).combine(batch, *map(jnp.asarray, inputs))
    np.testing.assert_allclose(loss, formula(cfg, batch, inputs), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_loss_matches_its_formula(name):
    check_formula(CASES[name], 0, packed=name in {"gspo", "ppo", "k3-reward", "sequence-masked"})


GRID = {
    "ratio": [TokenRatio.Config(), SequenceRatio.Config(), SequenceRatio.Config(normalize=False), CURRENT],
    "clip": [None, PpoClip.Config(high=0.28), PpoClip.Config(dual=3.0), CispoClip.Config(cap=1.2)],
    "penalty": [None, KlPenalty.Config(), KlPenalty.Config(estimator="k1", placement="reward")],
    "mean": [TokenMean.Config(), SequenceMean.Config(), FixedLengthMean.Config()],
    "critic": [None, GeneralizedAdvantages.Config(gamma=0.95)],
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_combinations_match_their_formulas(seed):
    for values in itertools.product(*GRID.values()):
        check_formula(Config(**dict(zip(GRID, values, strict=True))), seed, packed=bool(seed % 2))


def check_gradients(cfg, seed):
    """Compare gradients in float64 with differences of the formula, in random directions."""
    batch = batch_for(cfg, seed, packed=bool(seed % 2))
    inputs = arrays(batch, seed + 1)
    with jax.enable_x64(True):
        loss = lambda *x: BareObjective(cfg).combine(batch, *x, inputs[3])[0]  # noqa: E731
        grads = jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, inputs[:3])))
    rng, step = np.random.default_rng(seed), 1e-6
    for index, grad in enumerate(grads):
        direction = rng.standard_normal(grad.shape)
        ahead, behind = (
            formula(cfg, batch, [x + s * step * direction if i == index else x for i, x in enumerate(inputs)], inputs)
            for s in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(np.sum(grad * direction), expected, rtol=1e-5, atol=1e-8, err_msg=str(index))


@pytest.mark.fast_cases("grpo", "gspo", "cispo", "ppo", "truncated", "k1-importance")
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_finite_differences(name):
    check_gradients(CASES[name], seed=1)


# The objective with a model.

SMALL = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 16,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.attention.num_kv_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
}


def program(objective, *features, **settings):
    """Compose a small language model with the objective."""
    cfg = resolve("quickstart", with_=features, set={**SMALL, "mesh.shape": {}, **settings}).config
    return compose(patch(cfg, {"objective": objective}), jax.devices()[:1])


def moved(trainer):
    """Return a state whose model has moved from its start."""
    state, rng = trainer.init(0), np.random.default_rng(2)
    return state.replace(
        params={p: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for p, x in state.params.items()}
    )


def run_loss(trainer, state, batch):
    """Return (loss, summaries) of the training objective."""
    run = trainer.compile("loss", trainer.put(batch))
    return jax.device_get(run(ModelWeights(state.params, state.variables), trainer.put(batch)))


def log_softmax(trainer, params, batch):
    """Return log-probabilities at the temperature of the rollouts, float64 [R, S, V]."""
    bound = trainer.functional.bind(params)
    context = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}
    logits = np.asarray(bound(batch["tokens"], **context), np.float64) / batch["temperature"][:, None, None]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def picked(logs, batch):
    return np.take_along_axis(logs, batch["targets"][..., None], -1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("features", [(), ("lora:rank=2",)], ids=["all", "lora:rank=2"])
def test_log_probabilities_are_those_of_the_model(features):
    objective = Config(
        penalty=KlPenalty.Config(coefficient=0.3), mean=SequenceMean.Config(), entropy_bonus=0.2, loss_chunk=5
    )
    trainer, batch = program(objective, *features), random_batch(packed=True)
    assert bool(trainer.trained.frozen) == (not features), "with adapters, the reference needs no arrays"
    state = moved(trainer)
    prefix = "objective.reference."
    before = {p.removeprefix(prefix): x for p, x in state.variables.items() if p.startswith(prefix)}
    if features:
        before = {p: x if not p.endswith("lora_b") else 0 * x for p, x in state.params.items()}
    logs, reference = (log_softmax(trainer, p, batch) for p in (state.params, before))
    entropies = -(np.exp(logs) * logs).sum(-1)
    inputs = (np.zeros_like(entropies), picked(logs, batch), entropies, picked(reference, batch))
    value, report = run_loss(trainer, state, batch)
    np.testing.assert_allclose(value, formula(objective, batch, inputs), rtol=1e-5)
    real = batch["weights"] > 0
    x = (inputs[1] - batch["rollout_logprobs"])[real]
    for name, expected in {
        "train_rollout_difference": np.abs(x).max(),
        "ratio": np.exp(x).mean(),
        "ratio_max": np.exp(x).max(),
        "rollout_kl": (np.exp(x) - 1 - x).mean(),
        "entropy": entropies[real].mean(),
        "kl": kl_formula("k3", inputs[1], inputs[3])[real].mean(),
        "clip_fraction": np.where(batch["advantages"] > 0, np.exp(inputs[1] - batch["rollout_logprobs"]) > 1.2,
                                  np.exp(inputs[1] - batch["rollout_logprobs"]) < 0.8)[real].mean(),
        "weight": len(sequences_of(batch)),
    }.items():  # fmt: skip
        np.testing.assert_allclose(float(report[name]), expected, rtol=1e-4, err_msg=name)


def test_rollouts_of_the_same_weights_have_no_difference():
    """The difference and the clip are exactly 0 if the rollouts have the log-probabilities of the model."""
    trainer, batch = program(Config()), random_batch(temperature=1.0)
    state = trainer.init(0)
    objective = BareObjective(trainer.config.objective)

    def compare(params, batch):
        model = trainer.functional.bind(params)
        hidden, _ = model.hidden_states(batch)
        logprobs, _ = objective._log_probabilities(model, hidden, batch, with_gradient=False)
        return objective.loss(model, {**batch, "rollout_logprobs": logprobs}, None)

    _, report = jax.jit(compare)(state.params, batch)
    assert float(report["train_rollout_difference"]) == 0
    assert float(report["ratio_max"]) == 1
    assert float(report["clip_fraction"]) == 0


def test_log_probabilities_are_those_among_the_kept_tokens():
    """Tokens without a record keep the whole distribution, and the drawn token is always kept."""
    rng = np.random.default_rng(4)
    logits, targets = rng.standard_normal((2, 3, 8)).astype(np.float32), np.int32([[0, 1, 2], [3, 4, 5]])
    candidates = np.int32([[[0, 6, -1], [2, 3, -1], [-1, -1, -1]], [[3, -1, -1], [7, 4, 0], [5, 1, 2]]])
    limited = keep_tokens(jnp.asarray(logits), jnp.asarray(candidates), jnp.asarray(targets))
    result = jax.device_get(token_logprobs(limited, jnp.asarray(targets))[0])
    for (row, place), target in np.ndenumerate(targets):
        tokens = {*candidates[row, place], target} - {-1} if candidates[row, place, 0] >= 0 else range(8)
        mass = np.exp(np.float64(logits[row, place, list(tokens)])).sum()
        np.testing.assert_allclose(result[row, place], logits[row, place, target] - np.log(mass), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_loss_uses_the_kept_tokens_and_their_gradient():
    """The ratio of a model to itself is 1, and other tokens have no gradient."""
    trainer, batch = program(Config()), random_batch(temperature=1.0)
    state, rng = moved(trainer), np.random.default_rng(5)
    candidates = (
        np.stack([rng.permutation(64)[:10] for _ in range(batch["targets"].size)]).reshape(8, 16, 10).astype(np.int32)
    )
    logs = log_softmax(trainer, state.params, batch)
    allowed = np.zeros(logs.shape, bool)
    np.put_along_axis(allowed, candidates, True, -1)
    np.put_along_axis(allowed, batch["targets"][..., None], True, -1)
    limited = np.where(allowed, logs, -np.inf)
    limited = limited - np.log(np.exp(limited).sum(-1, keepdims=True))
    rollout = picked(limited, batch).astype(np.float32)
    _, report = run_loss(trainer, state, {**batch, "kept_tokens": candidates, "rollout_logprobs": rollout})
    assert report["train_rollout_difference"] < 1e-5
    assert report["ratio_max"] == pytest.approx(1, abs=1e-5)
    _, plain = run_loss(trainer, state, {**batch, "rollout_logprobs": rollout})
    assert plain["train_rollout_difference"] > 0.5


@pytest.mark.slow
def test_an_empty_row_changes_nothing():
    trainer, batch = program(Config(mean=SequenceMean.Config(), entropy_bonus=0.1)), random_batch()
    state = moved(trainer)
    empty = {name: np.concatenate([x[:6], np.zeros_like(x[6:])]) for name, x in batch.items()}
    value, report = run_loss(trainer, state, empty)
    expected, expected_report = run_loss(trainer, state, {name: x[:6] for name, x in batch.items()})
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert report["weight"] == expected_report["weight"] == 6


class PolicySuite(ObjectiveSuite):
    model = patch(resolve("quickstart", set=SMALL).config.model, {"decoder.hidden_dim": 32, 
        "decoder.layer.attention.num_heads": 8, "decoder.layer.attention.num_kv_heads": 8})  # fmt: skip

    def batch(self):
        return random_batch()


@pytest.mark.slow_cases(
    "test_sharded_*",
    "test_every_option_*",
    "test_the_loss_and_*",
    "test_frozen_*",
    "test_microbatches_*",
    "test_loss_depends_on_batch",
)
class TestGrpo(PolicySuite):
    config = Config(penalty=KlPenalty.Config(), mean=SequenceMean.Config(), entropy_bonus=0.01)


@pytest.mark.slow
class TestPpo(PolicySuite):
    config = patch(CASES["ppo"], {"critic.gamma": 0.9})
    options = {"critic.gamma": 0.5, "critic.decay": 0.5, "critic.coefficient": 0.5, "penalty.coefficient": 0.3}  # noqa: RUF012


@pytest.mark.slow
class TestGspo(PolicySuite):
    config = CASES["gspo"]
    options = {"clip.low": 0.1, "clip.high": 0.2, "ratio.normalize": False}  # noqa: RUF012

    def batch(self):
        """Return a batch whose ratios are beyond both limits of the clip."""
        batch = super().batch()
        return {
            **batch,
            "rollout_logprobs": batch["rollout_logprobs"] - np.sign(batch["advantages"]) * batch["weights"],
        }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(correction=ImportanceCorrection.Config()), "corrects for the rollouts a second time"),
        (Config(reference_weights="runs/x"), "is not used without a penalty"),
        (Config(penalty=KlPenalty.Config(estimator="k1")), "the expectation of its gradient is zero"),
        (
            Config(penalty=KlPenalty.Config(placement="reward", importance=True)),
            "applies only to a penalty in the loss",
        ),
        (Config(clip=PpoClip.Config(dual=1.1)), "is inside the range of the clip"),
        (Config(clip=CispoClip.Config(floor=6.0)), "is above cap"),
        (Config(ratio=CURRENT, correction=ImportanceCorrection.Config(low=3.0)), "is above high"),
    ],
)
def test_settings_without_a_meaning_are_rejected(config, message):
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_a_clip_of_values_needs_the_values_of_the_rollouts():
    cfg = CASES["clipped-critic"]
    batch = random_batch()
    with pytest.raises(RequestError, match="expected: rollout_values"):
        BareObjective(cfg).combine(batch, *map(jnp.asarray, arrays(batch)))


@pytest.mark.slow
def test_a_normalized_critic_depends_on_the_batch():
    objective = Config(critic=GeneralizedAdvantages.Config(normalize=True))
    assert program(objective).trained.batch_dependence == ("objective: critic normalizes advantages over the batch",)
    batch = random_batch()
    inputs = arrays(batch)
    tokens = select_drawn(batch, jnp.asarray(inputs[1]))
    result = BareCritic(objective.critic).assess(jnp.asarray(inputs[0]), batch, batch["rewards"], tokens)
    drawn = np.asarray(result.advantages)[batch["weights"] > 0]
    np.testing.assert_allclose([drawn.mean(), drawn.std()], [0, 1], atol=1e-5)
