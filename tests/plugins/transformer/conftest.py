import functools

import jax
import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.embedding import Head
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

TINY = CausalLM.Config(
    vocab_size=64,
    loss_chunk=16,
    decoder=Decoder.Config(
        num_layers=2,
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


@pytest.fixture
def batch():
    """Two rows of 48 random tokens and what follows them."""
    tokens = jax.random.randint(jax.random.key(7), (2, 49), 0, 64)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


QUICK = {"xla_backend_optimization_level": 0}  # most of the time of these tests would go into compiling


@functools.lru_cache(maxsize=64)
def _initialised(cfg, seed):
    graph = nnx.split(nnx.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))))[0]
    return graph, jax.jit(lambda: nnx.split(cfg.build(rngs=nnx.Rngs(seed)))[1], compiler_options=QUICK)()


@pytest.fixture
def build():
    """(config, seed) -> the model, its parameters made once per session under jit."""
    return lambda cfg, seed=0: nnx.merge(*_initialised(cfg, seed))


# Compiled once for all tests that ask for the same thing.
@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _call(graph, call, state, args, kwargs):
    model = nnx.merge(graph, state)
    return call(model, *args, **kwargs) if call else model(*args, **kwargs)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _step(graph, state, batch):
    return jax.value_and_grad(lambda s: nnx.merge(graph, s).loss(batch), has_aux=True)(state)


@pytest.fixture
def run():
    """(model, *args) -> model(*args) under jit; or `call(model, *args)`."""

    def run(model, *args, call=None, **kwargs):
        graph, state = nnx.split(model)
        return _call(graph, call, state, args, kwargs)

    return run


@pytest.fixture
def grads():
    """Compute loss, summaries and gradients of (config, batch), with parameters from seed 0 or `state`."""

    def grads(cfg, batch, state=None):
        graph, fresh = _initialised(cfg, 0)
        (loss, summaries), actual = _step(graph, fresh if state is None else state, batch)
        return loss, summaries, {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(actual)}

    return grads
