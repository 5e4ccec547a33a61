import functools

import jax
import pytest

import axlearn_core as ax
from axlearn_core.compose import compose
from axlearn_core.config import patch

SIZES = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 2,
    "model.decoder.stack.mode": "scan",
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 48,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
    "max_steps": 4,
}


@functools.cache
def _toy():
    return ax.resolve("quickstart", set=SIZES).config


@pytest.fixture
def toy():
    """Build the quickstart at toy size, with edits by path."""
    return lambda edits=None: patch(_toy(), edits or {})


@pytest.fixture
def batch():
    tokens = jax.random.randint(jax.random.key(7), (8, 17), 0, 64)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@functools.cache
def _program(config, devices):
    return compose(config, jax.devices()[:devices])


@pytest.fixture
def program():
    """Return a cached function (config, number of devices) -> program."""
    return lambda config, devices=1: _program(config, devices)


@functools.cache
def _trained(config, devices, steps):
    instance = _program(config, devices)
    tokens = jax.random.randint(jax.random.key(7), (8, 17), 0, 64)
    batch = instance.put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    first = instance.init(0)
    start = jax.tree.map(lambda x: x.copy(), first.params)
    state, losses = first, []
    for _ in range(steps):
        state, summary = instance.train_step(state, batch)
        losses.append(float(summary["loss"]))
    return start, state, losses


@pytest.fixture
def trained():
    """Return a cached function (config, devices, steps) -> (initial parameters, final state, losses)."""
    return lambda config, devices=1, steps=3: _trained(config, devices, steps)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield
