"""`eval_loss` is the cross-entropy of the held-out data, whatever regularises the training."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional, ModelAndObjective
from axlearn_core.config import Configurable, Node, node, patch
from axlearn_core.learn import Learner
from axlearn_core.nn import summaries
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train import LossEvaluator
from axlearn_core.train.step import TrainingFunctions
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.transformer import TransformerLayer
from support import toy_models

QUICK = {"xla_backend_optimization_level": 0}
ONE_LAYER = {"model.decoder.num_layers": 1}


class Penalty(Configurable, nnx.Module):
    """A third party's objective: the model's loss, and a penalty that it adds by itself."""

    @node
    class Config(Configurable.Config["Penalty"]):
        base: Node | None = None

    def __init__(self, cfg, *, rngs, model):
        self.base = None if cfg.base is None else cfg.base.build(rngs=rngs, model=model)

    def loss(self, model, batch, key):
        loss, report = model.loss(batch) if self.base is None else self.base.loss(model, batch, key)
        penalty = 0.1 * jnp.mean(model.decoder.embedding.weight[...] ** 2)
        return loss + penalty, {**report, "penalty": penalty}


class PenalisedLM(CausalLM):
    """A third party's model with a penalty in its loss."""

    @node
    class Config(CausalLM.Config):
        pass

    def loss(self, batch):
        loss, report = super().loss(batch)
        return loss + 1.0, {**report, "penalty": jnp.float32(1.0)}


class PenalisedLayer(TransformerLayer):
    """A third party's layer with a penalty on its activations."""

    @node
    class Config(TransformerLayer.Config):
        pass

    def __call__(self, x, context, cache=None):
        x, cache = super().__call__(x, context, cache)
        summaries.add_loss("activation_penalty", 0.1 * jnp.mean(x**2))
        return x, cache


def retyped(cfg, kind):
    return kind(**{name: getattr(cfg, name) for name in ("attention", "feed_forward", "norm", "post_norm")})


def language_model(cfg):
    model = cfg.model
    names = ("vocab_size", "decoder", "param_dtype", "dtype", "logit_softcap", "loss_chunk")
    return patch(cfg, {"model": PenalisedLM.Config(**{name: getattr(model, name) for name in names})})


CASES = {
    "dense": (lambda c: c, (), set()),
    "z-loss": (lambda c: patch(c, {"model.z_loss": 0.1}), (), {"z_loss"}),
    "mixture": (lambda c: c, ("moe:num_experts=4,top_k=2",), {"load_balance", "router_z_loss"}),
    "sigmoid mixture": (
        lambda c: c,
        ("moe:num_experts=4,top_k=2,router={type: sigmoid-router, load_balance: 0.1, z_loss: 0.1}",),
        {"load_balance", "router_z_loss"},
    ),
    "penalty of an objective": (lambda c: patch(c, {"objective": Penalty.Config()}), (), {"penalty"}),
    "penalty of a model": (language_model, (), {"penalty"}),
    "penalty of a layer": (
        lambda c: patch(c, {"model.decoder.layer": retyped(c.model.decoder.layer, PenalisedLayer.Config)}),
        (),
        {"activation_penalty"},
    ),
    "distillation": (lambda c: patch(c, {"model.z_loss": 0.1}), ("distill:temperature=2.0",), {"teacher_kl"}),
    "penalty around distillation": (
        lambda c: patch(c, {"model.z_loss": 0.1, "objective": Penalty.Config(base=c.objective)}),
        ("distill:temperature=2.0",),
        {"penalty"},
    ),
}


def trained(cfg):
    """(functions, state) of a config: what a run computes with."""
    model = Functional.from_config(cfg.model)
    both = ModelAndObjective.from_config(cfg, model)
    learner = cfg.learner.build(max_steps=2, axes=both.axes)
    functions = TrainingFunctions(model, learner, both)
    return functions, jax.jit(functions.init, compiler_options=QUICK)(jax.random.key(0))


def held_out(rows=6, batch=4):
    """Batches of packed rows with padding at their ends; the last batch is filled up with rows of padding."""
    rng, whole = np.random.default_rng(3), []
    for _ in range(rows):
        one = toy_models.batch(seed=int(rng.integers(100)), rows=1)
        end = int(rng.integers(6, toy_models.LENGTH))
        ids = np.where(np.arange(toy_models.LENGTH) < end // 2, 1, 2) * (np.arange(toy_models.LENGTH) < end)
        at = np.where(ids == 2, np.arange(toy_models.LENGTH) - end // 2, np.arange(toy_models.LENGTH)) * (ids > 0)
        one |= {"segment_ids": ids[None].astype(np.int32), "positions": at[None].astype(np.int32)}
        whole.append({**one, "weights": one["weights"] * (ids > 0)[None], "bytes": 3.0 * one["weights"]})
    whole += [{k: np.zeros_like(v) for k, v in whole[0].items()}] * (-rows % batch)
    joined = {k: np.concatenate([row[k] for row in whole]).astype(whole[0][k].dtype) for k in whole[0]}
    return [{k: v[i : i + batch] for k, v in joined.items()} for i in range(0, len(whole), batch)]


def evaluated(functions, state, batches):
    """What the evaluator of a run logs."""
    step = jax.jit(functions.evaluate, compiler_options=QUICK)
    source = SimpleNamespace(evaluation=lambda: Batches(batches))
    evaluator = LossEvaluator(LossEvaluator.Config(), name="eval", input=source, build_input=None)
    program = SimpleNamespace(eval_step=step)
    return evaluator.run(SimpleNamespace(state=state, program=program, put=lambda batch: batch))


class Batches:
    def __init__(self, batches):
        self.rest = list(batches)

    def __iter__(self):
        return iter(self.rest)

    def close(self):
        self.rest = []


def cross_entropy(functions, params, variables, batches):
    """By NumPy from the logits that the model itself gives: (mean over all targets, sum)."""

    @jax.jit
    def logits_of(params, variables, batch):
        model = functions.functional.bind(params, variables)
        return model(batch["tokens"], batch["positions"], batch["segment_ids"])

    total = weight = 0.0
    own = {path: variables[path] for path in functions.functional.variables}
    for batch in batches:
        logits = np.asarray(logits_of(params, own, batch), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= (np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0] * batch["weights"]).sum()
        weight += batch["weights"].sum()
    return total / weight, total


def training(functions, state, batch):
    """(loss, what is reported) of a training step."""
    step = jax.jit(functions.training_loss, compiler_options=QUICK)
    variables = functions.trained.begin_step(state.variables)
    loss, (report, _) = step(state.params, variables, batch, jax.random.key(0))
    return float(loss), summaries.get_scalars(report)


@pytest.mark.fast_cases("penalty of a model")
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_cross_entropy_that_numpy_computes(case):
    change, features, logged = CASES[case]
    cfg = change(resolve(patch(toy_models.small("quickstart"), ONE_LAYER), with_=features).config)
    functions, state = trained(cfg)
    batches = held_out()
    values = evaluated(functions, state, batches)
    mean, total = cross_entropy(functions, state.params, state.variables, batches)
    assert values["eval_loss"] == pytest.approx(mean, abs=1e-5)
    assert values["eval_nats_per_byte"] == pytest.approx(total / sum(b["bytes"].sum() for b in batches), abs=1e-5)
    assert "eval_cross_entropy" not in values, "it is the loss"
    # Training has the auxiliary terms, under names of their own.
    rows = {k: v for k, v in batches[0].items() if k != "bytes"}
    loss, report = training(functions, state, rows)
    assert logged <= report.keys()
    first, _ = cross_entropy(functions, state.params, state.variables, batches[:1])
    if logged:
        assert abs(loss - first) > 1e-4, "the case regularises nothing"


@pytest.mark.slow
def test_auxiliary_losses_of_held_out_data_have_names_of_their_own():
    cfg = resolve(patch(toy_models.small("quickstart"), ONE_LAYER), with_=["moe:num_experts=4,top_k=2"]).config
    functions, state = trained(cfg)
    values = evaluated(functions, state, held_out())
    assert values.keys() == {
        "eval_loss", "eval_nats_per_byte", "eval_load_balance", "eval_router_z_loss", "eval_expert_load_max",
        "eval_expert_load_entropy",
    }  # fmt: skip
    # Rows of padding alone change nothing, in a batch of their own either.
    more = [*held_out(), {k: np.zeros_like(v) for k, v in held_out()[0].items()}]
    assert evaluated(functions, state, more) == pytest.approx(values, rel=1e-6)


@pytest.mark.slow
def test_it_is_that_of_the_moving_average():
    cfg = patch(toy_models.small("quickstart"), {**ONE_LAYER, "learner": Learner.Config(ema_decay=0.5)})
    functions, state = trained(cfg)
    shifted = {path: 1.5 * average for path, average in state.learner.ema.items()}
    state = state.replace(learner=state.learner._replace(ema=shifted))
    batches = held_out()
    loss = evaluated(functions, state, batches)["eval_loss"]
    assert loss == pytest.approx(cross_entropy(functions, shifted, state.variables, batches)[0], abs=1e-5)
    assert abs(loss - cross_entropy(functions, state.params, state.variables, batches)[0]) > 1e-3


@pytest.mark.slow
def test_preferences_are_measured_without_smoothing_and_auxiliary_losses():
    features = ["dpo:data=pairs.jsonl,label_smoothing=0.3", "moe:num_experts=4,top_k=2"]
    cfg = resolve(patch(toy_models.small("quickstart"), ONE_LAYER), with_=features).config
    functions, state = trained(cfg)
    model = functions.functional.abstract
    state = state.replace(params={p: x * (1.2 if p in model else 1.0) for p, x in state.params.items()})
    batch = toy_models.batch_for(cfg)
    values = evaluated(functions, state, [batch])
    assert values["eval_reward_margin"] == pytest.approx(float(training(functions, state, batch)[1]["reward_margin"]))
    assert {"eval_load_balance", "eval_router_z_loss", "eval_reward_accuracy"} <= values.keys()

    router = "model.decoder.layer.feed_forward.router"
    plain = {"objective.label_smoothing": 0.0, f"{router}.load_balance": 0.0, f"{router}.z_loss": 0.0}
    loss, _ = training(trained(patch(cfg, plain))[0], state, batch)
    assert values["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert abs(training(functions, state, batch)[0] - loss) > 1e-3


@pytest.mark.slow
def test_labels_of_images_are_not_smoothed():
    sizes = {"model.hidden_dim": 32, "model.encoder.num_layers": 1, "model.encoder.embedding.image_size": 16}
    cfg = resolve("vit-tiny", with_=["moe:num_experts=4"], set={**sizes, "model.label_smoothing": 0.3}).config
    functions, state = trained(cfg)
    rng = np.random.default_rng(0)
    images, labels = rng.random((6, 16, 16, 3), np.float32), rng.integers(0, 4, 6, dtype=np.int32)
    batch = {"images": images, "labels": labels, "weights": np.float32([1, 1, 1, 1, 0, 0])}
    logits = np.asarray(jax.jit(lambda p, x: functions.functional.bind(p)(x))(state.params, images), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    values = evaluated(functions, state, [batch])
    expected = -log_p[np.arange(4), labels[:4]].mean()
    assert values["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert values["eval_accuracy"] == pytest.approx((logits[:4].argmax(-1) == labels[:4]).mean())
    loss, report = training(functions, state, batch)
    assert float(report["cross_entropy"]) == pytest.approx(expected, abs=1e-5)
    assert abs(loss - expected) > 1e-3
    # The images that fill up the batch count in no statistic of the layers.
    whole = {k: v[:4] for k, v in batch.items()}
    assert values == pytest.approx(evaluated(functions, state, [whole]), rel=1e-5)
