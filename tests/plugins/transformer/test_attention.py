"""The attention layer in parts: a subclass changes one of them."""

import attrs
import jax
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.extend import Constant, Context, node
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.paged_cache import PagedCache

SIZES = {"model.decoder.num_layers": 2, "model.decoder.hidden_dim": 32, "model.vocab_size": 64}


class SinkAttention(Attention):
    """Attention with a sink for each head, as in gpt-oss, and an output gate, as in Qwen3-Next."""

    @node
    class Config(Attention.Config):
        """The settings of `Attention`."""

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.sinks = self.parameter(rngs, Constant(value=2.0), (cfg.num_heads,), ("heads",))
        self.gate = self.parameter(rngs, Constant(value=0.1), (cfg.input_dim,), ("embed",))

    def scores(self, query, key, value, context):
        return attrs.evolve(super().scores(query, key, value, context), sinks=self.computed(self.sinks))

    def finish(self, context_vectors, x):
        gate = jax.nn.sigmoid(x @ self.computed(self.gate)[:, None])
        return super().finish(context_vectors, x) * gate


@pytest.fixture(scope="module", params=["contiguous", "paged"])
def model(request):
    config = ax.resolve("quickstart", set=SIZES).config.model
    base = config.decoder.layer.attention
    fields = {a.name: getattr(base, a.name) for a in attrs.fields(type(base))}
    attention = SinkAttention.Config(**fields)
    if request.param == "paged":
        attention = attrs.evolve(attention, kv_cache=PagedCache.Config(page_size=4))
    config = patch(config, {"decoder.layer.attention": attention})
    return config.build(rngs=nnx.Rngs(0))


@nnx.jit
def run(model, tokens):
    return model.logits(model.decoder(tokens, Context())[0])


def test_a_cache_gives_the_logits_of_the_whole_row(model):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    whole = run(model, tokens)
    cache, parts = model.init_cache(2, 12), []
    step = jax.jit(lambda tokens, cache: model(tokens, cache=cache))
    for begin, end in ((0, 6), (6, 7), (7, 12)):
        logits, cache = step(tokens[:, begin:end], cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=2e-4, atol=2e-4)


def test_sinks_and_the_gate_matter(model):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    before = run(model, tokens)
    for part in ("sinks", "gate"):
        changed = nnx.clone(model)
        for _, layer in nnx.iter_modules(changed):
            if isinstance(layer, SinkAttention):
                getattr(layer, part).set_value(getattr(layer, part).get_value() + 1.0)
        assert np.abs(run(changed, tokens) - before).max() > 1e-3, part
