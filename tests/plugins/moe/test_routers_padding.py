"""Routers count tokens, but not padding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional, ModelAndObjective
from axlearn_core.config import patch
from axlearn_core.nn import padding, summaries
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.step import TrainingFunctions
from axlearn_plugins_moe.dispatch import CapacityDispatch
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import ExpertChoiceRouter, SigmoidRouter, SoftmaxRouter
from support import toy_models

QUICK = {"xla_backend_optimization_level": 0}
E, K, D = 4, 2, 8
LENGTHS = np.asarray([7, 3, 0])
REAL = np.arange(7)[None] < LENGTHS[:, None]
ROUTERS = {
    "softmax": SoftmaxRouter.Config(load_balance=0.5, z_loss=0.25),
    "sigmoid": SigmoidRouter.Config(load_balance=0.5, z_loss=0.25),
    "expert choice": ExpertChoiceRouter.Config(z_loss=0.25),
}


def layer(router, dispatch=None):
    more = {} if dispatch is None else {"dispatch": dispatch}
    cfg = MixtureOfExperts.Config(num_experts=E, top_k=K, hidden_dim=8, router=router, **more)
    module = cfg.build(input_dim=D, rngs=nnx.Rngs(0), precision=Precision())
    module.router.weight[...] = jnp.asarray(np.random.default_rng(5).normal(size=(D, E)), jnp.float32)
    return module


def route(module, x, context):
    """Return (output, losses, summaries, load) of a layer within rows of this context."""
    graph, state = nnx.split(module)

    @jax.jit
    def run(state, x, context):
        module = nnx.merge(graph, state)
        with summaries.collect() as collector, padding.use_context(context):
            y = module(x)
        load = module.router.load[...] if hasattr(module.router, "load") else None
        return y, collector.losses, summaries.get_scalars(collector.summaries), load

    return jax.device_get(run(state, jnp.asarray(x), context))


def inputs():
    return np.random.default_rng(0).normal(size=(3, 7, D)).astype(np.float32)


@pytest.mark.fast_cases("expert choice")
@pytest.mark.parametrize("name", ROUTERS)
def test_padding_counts_in_no_statistic(name):
    module, x = layer(ROUTERS[name], CapacityDispatch.Config(capacity_factor=0.75)), inputs()
    context = Context(segment_ids=jnp.asarray(REAL, jnp.int32))
    _, losses, reported, load = route(module, x, context)
    assert losses.keys() | reported.keys() >= {"router_z_loss", "expert_load_max", "dropped_assignments"}
    noise = np.where(REAL[..., None], x, 100 * np.random.default_rng(1).normal(size=x.shape).astype(np.float32))
    _, *others = route(module, noise, context)
    jax.tree.map(np.testing.assert_array_equal, others, [losses, reported, load])

    router = np.asarray(module.router.weight[...], np.float64)
    logits = (x.astype(np.float64) @ router)[REAL]
    log_z = np.log(np.exp(logits).sum(-1))
    assert losses["router_z_loss"] == pytest.approx(0.25 * np.mean(log_z**2), rel=1e-5)


@pytest.mark.fast_cases("expert choice")
@pytest.mark.parametrize("name", ROUTERS)
def test_padding_takes_no_capacity(name):
    """A row in a batch with longer rows uses the experts that it uses alone."""
    module, x = layer(ROUTERS[name], CapacityDispatch.Config(capacity_factor=0.75)), inputs()
    padded, _, reported, _ = route(module, x, Context(real=jnp.asarray(REAL)))
    assert reported["dropped_assignments"] > 0 or name == "expert choice"
    for row, length in enumerate(LENGTHS[:2]):
        alone, *_ = route(module, x[row : row + 1, :length], None)
        np.testing.assert_allclose(padded[row, :length], alone[0], rtol=1e-5, atol=1e-6)


def softmax(logits):
    z = np.exp(logits - logits.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def test_load_balance_of_a_batch_is_over_its_tokens():
    module, x = layer(ROUTERS["softmax"]), inputs()
    _, losses, reported, _ = route(module, x, Context(segment_ids=jnp.asarray(REAL, jnp.int32)))
    p = softmax((x.astype(np.float64) @ np.asarray(module.router.weight[...], np.float64))[REAL])
    share = np.bincount(np.argsort(-p, -1)[:, :K].ravel(), minlength=E) / (K * len(p))
    assert losses["load_balance"] == pytest.approx(0.5 * E * (share * p.mean(0)).sum(), rel=1e-5)
    assert reported["expert_load_max"] == pytest.approx(E * share.max(), rel=1e-5)
    entropy = -(share * np.log(np.maximum(share, 1e-9))).sum() / np.log(E)
    assert reported["expert_load_entropy"] == pytest.approx(entropy, rel=1e-5)


def test_load_balance_averages_nonempty_rows_and_the_bias_counts_tokens():
    module, x = layer(ROUTERS["sigmoid"]), inputs()
    _, losses, _, load = route(module, x, Context(segment_ids=jnp.asarray(REAL, jnp.int32)))
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ np.asarray(module.router.weight[...], np.float64))))
    balance, total = [], np.zeros(E)
    for row, length in zip(scores, LENGTHS, strict=True):
        if length:
            row = row[:length]
            chosen = np.bincount(np.argsort(-row, -1)[:, :K].ravel(), minlength=E)
            balance.append(E * (chosen / (K * length) * (row / row.sum(-1, keepdims=True)).mean(0)).sum())
            total += chosen
    assert losses["load_balance"] == pytest.approx(0.5 * np.mean(balance), rel=1e-5)
    np.testing.assert_array_equal(load, total)


@pytest.mark.fast_cases("expert choice")
@pytest.mark.parametrize("name", ROUTERS)
def test_without_padding_no_bit_changes(name):
    module = layer(ROUTERS[name], CapacityDispatch.Config(capacity_factor=0.75))
    x = inputs()
    plain = route(module, x, None)
    for context in (Context(), Context(segment_ids=jnp.ones((3, 7), jnp.int32)), Context(real=jnp.ones((3, 7), bool))):
        jax.tree.map(np.testing.assert_array_equal, route(module, x, context), plain)


def functions(*features, layers=2):
    cfg = resolve(patch(toy_models.small("quickstart"), {"model.decoder.num_layers": layers}), with_=features).config
    both = ModelAndObjective.from_config(cfg)
    learner = cfg.learner.build(max_steps=2, axes=both.axes)
    return TrainingFunctions(Functional.from_config(cfg.model), learner, both)


@functools.cache
def loss_of(program):
    """Return a compiled function (batch) -> (loss, summaries, variables and totals of the step)."""
    state = jax.jit(program.init, compiler_options=QUICK)(jax.random.key(0))
    variables = program.trained.begin_step(state.variables)

    def run(params, variables, batch):
        loss, (report, after) = program.training_loss(params, variables, batch, jax.random.key(0))
        return loss, summaries.get_scalars(report), after

    compiled = jax.jit(run, compiler_options=QUICK)
    return lambda batch: jax.device_get(compiled(state.params, variables, batch))


def step(program, batch):
    """Return (new state, summaries) of one training step."""
    state = jax.jit(program.init, compiler_options=QUICK)(jax.random.key(0))
    return jax.device_get(jax.jit(program.train, compiler_options=QUICK)(state, batch))


SOFTMAX, SIGMOID = "moe:num_experts=4,top_k=2", "moe:num_experts=4,top_k=2,router={type: sigmoid-router, z_loss: 0.1}"
FEATURES = {
    "scan": (SOFTMAX, "scan"),
    "unrolled": (SIGMOID,),
    "rematerialised": (SIGMOID, "scan", "remat:save=[]"),
    "pipeline": (SIGMOID, "pipeline:microbatches=2"),
    "accumulation": (SIGMOID, "gradient-accumulation:steps=2"),
}


def filled_up():
    """Return a batch with padding, and the same batch with other tokens in the padding."""
    batch = toy_models.batch(rows=4)
    real = np.arange(toy_models.LENGTH)[None] < np.asarray([16, 5, 9, 0])[:, None]
    batch |= {"segment_ids": real.astype(np.int32), "weights": batch["weights"] * real}
    return batch, {**batch, "tokens": np.where(real, batch["tokens"], (batch["tokens"] + 7) % toy_models.VOCABULARY)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "unrolled", "rematerialised", "pipeline"])
def test_statistics_know_the_tokens_however_layers_run(name):
    loss = loss_of(functions(*FEATURES[name]))
    one, two = map(loss, filled_up())
    jax.tree.map(np.testing.assert_array_equal, one, two)
    everything = {k: v for k, v in filled_up()[0].items() if k != "segment_ids"}
    report = loss({**everything, "weights": np.ones_like(everything["weights"])})[1]
    assert report["expert_load_entropy"] != one[1]["expert_load_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_what_fills_up_a_batch_changes_no_training_step(name):
    program = functions(*FEATURES[name])
    jax.tree.map(np.testing.assert_array_equal, *(step(program, batch) for batch in filled_up()))


def differentiated(program, state, batch):
    """Return ((loss, (summaries, variables and totals)), gradients), for tracing."""
    grad = jax.value_and_grad(program.training_loss, has_aux=True)
    return grad(state.params, program.trained.begin_step(state.variables), batch, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unrolled", pytest.param("scan", marks=pytest.mark.slow)])
def test_segment_ids_without_padding_change_no_bit_of_a_loss_or_a_load(name, monkeypatch):
    batch = toy_models.batch(rows=4)
    batch["segment_ids"] = np.ones_like(batch["tokens"])

    def computed():
        program = functions(*FEATURES[name], layers=1)
        state = jax.jit(program.init, compiler_options=QUICK)(jax.random.key(0))
        return jax.device_get(jax.jit(functools.partial(differentiated, program), compiler_options=QUICK)(state, batch))

    masked, grads = computed()
    monkeypatch.setattr(padding, "tokens", lambda *_: None)
    everything, expected = computed()
    jax.tree.map(np.testing.assert_array_equal, masked, everything)
    # XLA fuses the gradients of the two programs in different ways, so that their last bits can differ.
    for path, grad in expected.items():
        assert np.linalg.norm(grads[path] - grad) <= 1e-6 * np.linalg.norm(grad), path


def test_without_segment_ids_and_weights_the_program_is_the_same(monkeypatch):
    program = functions(*FEATURES["unrolled"], layers=1)
    state = jax.eval_shape(program.init, jax.random.key(0))
    batch = {k: v for k, v in toy_models.batch(rows=4).items() if k in ("tokens", "targets")}
    program = functools.partial(differentiated, program)
    now = str(jax.make_jaxpr(program)(state, batch))
    monkeypatch.setattr(padding, "tokens", lambda *_: None)
    assert without_addresses(str(jax.make_jaxpr(program)(state, batch))) == without_addresses(now)


def without_addresses(jaxpr):
    """The text of a program without the addresses of Python objects."""
    return re.sub(r"0x[0-9a-f]+", "", jaxpr)
