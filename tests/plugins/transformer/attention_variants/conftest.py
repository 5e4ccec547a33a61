import functools

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_core.nn.layer import Precision
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.embedding import Head
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

QUICK = {"xla_backend_optimization_level": 0}  # most of the time of these tests would go into compiling

TINY = CausalLM.Config(
    vocab_size=64,
    loss_chunk=16,
    decoder=Decoder.Config(
        num_layers=4,
        hidden_dim=32,
        head=Head.Config(),
        layer=TransformerLayer.Config(
            attention=Attention.Config(num_heads=4, num_kv_heads=2, position=RotaryEmbedding.Config()),
            feed_forward=GatedFeedForward.Config(hidden_dim=48),
        ),
    ),
)


@pytest.fixture
def tiny():
    """A small Llama's config, with edits by path."""
    return lambda edits=None: patch(TINY, edits or {})


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _called(graph, call, state, args, kwargs):
    module = nnx.merge(graph, state)
    return call(module, *args, **kwargs) if call else module(*args, **kwargs)


@pytest.fixture
def run():
    """Return a function that jits `module(*args)`, or `call(module, *args)`, and calls it."""

    def run(module, *args, call=None, **kwargs):
        graph, state = nnx.split(module)
        return _called(graph, call, state, args, kwargs)

    return run


def normal(*shape, seed=0):
    """Draw random numbers with NumPy, which does not compile anything."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.fixture(name="normal")
def normal_():
    """(*shape, seed) -> random numbers."""
    return normal


@pytest.fixture
def layer():
    """(config, width) -> the layer, with random weights everywhere (norms and biases too)."""

    def layer(cfg, width=24):
        graph, state = nnx.split(
            nnx.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0), precision=Precision(), input_dim=width))
        )
        leaves, tree = jax.tree.flatten(state)
        values = [0.4 * np.asarray(normal(*leaf.shape, seed=i)) + (leaf.ndim == 1) for i, leaf in enumerate(leaves)]
        return nnx.merge(graph, tree.unflatten(jax.device_put([v.astype(np.float32) for v in values])))

    return layer
