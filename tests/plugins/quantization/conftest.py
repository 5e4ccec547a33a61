import functools

import jax
import pytest

import axlearn_core as ax
from axlearn_core.config import patch

SIZES = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 2,
    "model.decoder.stack.mode": "scan",
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
    "model.decoder.layer.attention.output.init.scale": 1.0,
    "model.decoder.layer.feed_forward.down.init.scale": 1.0,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.003},
    "max_steps": 200,
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


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield
