"""Dropout: which masks differ, which masks are equal, and modes without dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core import compose, patch
from axlearn_core.compose import Functional
from axlearn_core.config import Node, interface, node
from axlearn_core.learn import value_and_grad
from axlearn_core.nn import randomness
from axlearn_core.nn.layer import Layer
from axlearn_core.train.step import TrainingFunctions
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.dropout import Dropout
from axlearn_plugins_transformer.feed_forward import FeedForward, GatedFeedForward
from support import toy_models

RATE = ["dropout:rate=0.3"]
KEY = jax.random.key(5)


@functools.cache
def config(mode="scan", *more):
    tree = toy_models.resolve(toy_models.small("llama2-7b"), with_=[*RATE, *more]).config
    return patch(tree, {"model.decoder.stack.mode": mode, "model.dtype": "float32"})


def loss_and_gradients(cfg, key=KEY, devices=None, parts=1):
    """Compute (loss, gradients) of the toy batch, compiled like a training step on these devices."""
    program = compose(cfg, devices or jax.devices()[:1])
    functions = TrainingFunctions(program.functional, None)
    params = toy_models.filled(program.functional)
    places = {p: s.sharding for p, s in program.state.params.items()}

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, batch, key):
        with program.tracing("train"):
            return value_and_grad(functions.training_loss, params, {}, batch, key, parts)

    placed = {p: jax.device_put(x, places[p]) for p, x in params.items()}
    (loss, *_), grads = jax.device_get(run(placed, program.put(toy_models.batch()), key))
    return float(loss), grads


def close(one, other, tolerance=1e-5):
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    for path, gradient in one[1].items():
        scale = np.linalg.norm(gradient) + 1e-6
        assert np.linalg.norm(gradient - other[1][path]) < tolerance * scale, path


@pytest.mark.slow
def test_parameters_begin_as_they_do_without_dropout():
    plain = Functional.from_config(toy_models.small("llama2-7b").model).init(KEY)
    dropped = Functional.from_config(config().model).init(KEY)
    assert plain.keys() == dropped.keys()
    assert all((plain[p] == dropped[p]).all() for p in plain)


@pytest.mark.slow
def test_evaluation_draws_nothing():
    with_dropout, without = (
        Functional.from_config(config().model),
        Functional.from_config(patch(toy_models.small("llama2-7b"), {"model.dtype": "float32"}).model),
    )
    params = toy_models.filled(without)
    assert with_dropout.bind(params).loss(toy_models.batch())[0] == without.bind(params).loss(toy_models.batch())[0]
    assert (
        with_dropout.bind(params, key=KEY).loss(toy_models.batch())[0]
        != without.bind(params).loss(toy_models.batch())[0]
    )


def test_every_stream_has_keys_of_its_own():
    functional = Functional.from_config(config().model)
    keys = [p for p, s in functional.streams.items() if randomness.is_key(s)]
    assert len(keys) == 3  # attention, feed-forward, embedding
    values = [
        np.asarray(jax.random.key_data(randomness.derive(functional.streams[p], p, KEY))).reshape(-1, 2) for p in keys
    ]
    drawn = {tuple(row) for rows in values for row in rows}
    assert len(drawn) == 2 + 2 + 1  # two layers each, and the embedding
    assert any("dropout draws random numbers" in reason for reason in functional.batch_dependence)


@pytest.mark.slow
def test_masks_differ_by_microbatch_and_step():
    batch = {k: jnp.concatenate([v[:8]] * 2) for k, v in toy_models.batch().items()}
    functional = Functional.from_config(config().model)
    functions = TrainingFunctions(functional, None)
    params = toy_models.filled(functional)
    rows = [{k: v[i : i + 8] for k, v in batch.items()} for i in (0, 8)]
    same = [functions.training_loss(params, {}, part, KEY)[0] for part in rows]
    assert same[0] == same[1]
    parts = [functions.training_loss(params, {}, rows[0], jax.random.fold_in(KEY, i))[0] for i in range(2)]
    assert parts[0] != parts[1]
    accumulated = value_and_grad(functions.training_loss, params, {}, toy_models.batch(), KEY, 2)[0][0]
    assert accumulated != value_and_grad(functions.training_loss, params, {}, toy_models.batch(), KEY)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "more"), [("unrolled", ()), ("scan", ("remat:save=[]",)), ("unrolled", ("remat:save=[]",))]
)
def test_how_the_stack_runs_changes_no_mask(mode, more):
    close(loss_and_gradients(config(mode, *more)), loss_and_gradients(config()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{"fsdp": 8}, {"data": 4, "tensor": 2}, pytest.param({"tensor": 8}, marks=pytest.mark.slow)]
)
def test_the_mesh_changes_no_mask(shape):
    sharded = patch(config(), {"mesh.shape": shape})
    close(loss_and_gradients(sharded, devices=jax.devices()), loss_and_gradients(config()))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"pipeline": 2, "fsdp": 4}])
def test_a_pipeline_draws_per_microbatch_whatever_its_stages(shape):
    piped = patch(config("scan", "pipeline:microbatches=2"), {"mesh.shape": shape})
    devices = jax.devices() if shape else jax.devices()[:1]
    loss, _ = loss_and_gradients(piped, devices=devices)
    single, _ = loss_and_gradients(patch(piped, {"mesh.shape": {}}))
    assert loss == pytest.approx(single, rel=1e-5)
    assert loss != loss_and_gradients(config())[0]


class OwnBlock(Layer):
    """A block of an unrelated class that does not know dropout."""

    @node
    class Config(Layer.Config["OwnBlock"]):
        input_dim: int = interface()
        attention: Node[AttentionLayer] = Attention.Config(num_heads=2)
        feed_forward: Node[FeedForward] = GatedFeedForward.Config(hidden_dim=16)

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.attention = self.child(cfg.attention, rngs=rngs, input_dim=cfg.input_dim)
        self.feed_forward = self.child(cfg.feed_forward, rngs=rngs, input_dim=cfg.input_dim)

    def cache_spec(self):
        return self.attention.cache_spec()

    def __call__(self, x, context, cache=None):
        y, cache = self.attention(x, context, cache)
        return x + y + self.feed_forward(x), cache


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["scan", "unrolled"])
def test_blocks_of_any_class_drop_out(mode):
    edits = {"model.decoder.layer": OwnBlock.Config(), "model.decoder.stack.mode": mode, "model.dtype": "float32"}
    own = patch(toy_models.small("llama2-7b"), edits)
    dropped = Dropout(rate=0.3).apply(own)
    assert Dropout(rate=0.3).in_effect(dropped)
    assert Dropout(rate=0.2).apply(dropped) == Dropout(rate=0.2).apply(own)
    plain, functional = Functional.from_config(own.model), Functional.from_config(dropped.model)
    params = {p: toy_models.filled(plain)[p.replace(".base.", ".")] for p in functional.abstract}
    model = functional.bind(params)
    silent = plain.bind({p.replace(".base.", "."): x for p, x in params.items()})
    assert model.loss(toy_models.batch())[0] == silent.loss(toy_models.batch())[0]
    losses = [functional.bind(params, key=jax.random.key(i)).loss(toy_models.batch())[0] for i in (1, 2)]
    assert losses[0] != losses[1]
    assert list(model.generate([1, 2, 3], max_tokens=2)) == list(silent.generate([1, 2, 3], max_tokens=2))


def test_adapters_go_on_the_halves_of_any_block():
    own = patch(toy_models.small("llama2-7b"), {"model.decoder.layer": OwnBlock.Config()})
    config = toy_models.resolve(own, with_=["dropout:rate=0.3", "lora:rank=2,target=model.**.attention.*"]).config
    functional = Functional.from_config(config.model)
    adapters = {p for p in functional.abstract if p.endswith("lora_a")}
    assert {p.rpartition(".")[0] for p in adapters} == {
        f"decoder.layer.attention.base.{name}" for name in ("query", "key", "value", "output")
    }


@pytest.mark.slow
def test_a_step_follows_from_seed_and_step_alone():
    program = compose(config(), jax.devices()[:1])
    batch = program.put(toy_models.batch())
    state = program.init(seed=0)
    later = state.replace(step=state.step + 1)
    copies = [jax.tree.map(lambda x: x.copy(), s) for s in (state, state, later)]
    losses = [float(program.train_step(s, batch)[1]["loss"]) for s in copies]
    assert losses[0] == losses[1] != losses[2]
