"""The attention layer in parts: a subclass changes one of them."""

import functools

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_core.extend import Constant, Context, node
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.kernels.masks import Causal, Chunks, FixedPrefix, Full, Prefix, SlidingWindow
from axlearn_plugins_transformer.kv_cache import hide_unwritten
from axlearn_plugins_transformer.paged_cache import PagedCache, PagedSlots, paged_mask
from support import mask_layers

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


@functools.cache
def masked_model(name, layout="contiguous"):
    cache = {} if layout == "contiguous" else {"decoder.layer.attention.kv_cache": PagedCache.Config(page_size=4)}
    edits = SIZES | {"model.decoder.layer.attention.num_heads": 2, "model.decoder.layer.attention.num_kv_heads": 1}
    return mask_layers.config(ax.resolve("quickstart", set=edits).config.model, name, **cache).build(rngs=nnx.Rngs(0))


FAST = ("chunks", "contiguous")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout) if (name, layout) == FAST else pytest.param(name, layout, marks=pytest.mark.slow)
        for name in mask_layers.LAYERS
        for layout in ("contiguous", "paged")
    ],
)
def test_a_cache_gives_the_logits_of_a_layer_with_another_mask(name, layout):
    model = masked_model(name, layout)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    run = jax.jit(lambda tokens, cache=None: model(tokens, cache=cache))
    whole = run(tokens)
    cache, parts = model.init_cache(2, 16), []
    for begin, end in ((0, 6), (6, 7), (7, 12)):
        logits, cache = run(tokens[:, begin:end], cache)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", mask_layers.LAYERS)
def test_a_layer_with_another_mask_trains_on_packed_documents(name):
    """Documents in one row have the logits of separate rows, and the loss has gradients."""
    model = masked_model(name)
    documents = [jax.random.randint(jax.random.key(i), (1, n), 0, 64) for i, n in enumerate((7, 11))]
    ids = jnp.asarray([[1] * 7 + [2] * 11], jnp.int32)
    positions = jnp.asarray([[*range(7), *range(11)]], jnp.int32)
    packed = model(jnp.concatenate(documents, 1), positions=positions, segment_ids=ids)
    separate = jnp.concatenate([model(tokens) for tokens in documents], 1)
    np.testing.assert_allclose(packed, separate, rtol=2e-4, atol=2e-4)

    def loss(model):
        return jnp.mean(model(jnp.concatenate(documents, 1), positions=positions, segment_ids=ids) ** 2)

    norms = [jnp.linalg.norm(g) for g in jax.tree.leaves(nnx.grad(loss)(model))]
    assert all(jnp.isfinite(n) and n > 0 for n in norms)


def test_masks_determine_how_long_a_cache_lives():
    entries = {name: jax.tree.leaves(masked_model(name).cache_spec())[0] for name in mask_layers.LAYERS}
    assert {name: (e.window, e.prefix) for name, e in entries.items()} == {
        "chunks": (mask_layers.CHUNK, 0),
        "prefix": (None, mask_layers.PREFIX),
        "selected": (None, 0),
    }


def hidden(mask, window=None, prefix=0, real=None):
    """Return which of 12 slots 3 new tokens at slots 6 to 8 see."""
    slots = jnp.arange(6, 9, dtype=jnp.int32)[None]
    spec = CacheEntry(per="token", shape=(1,), dtype="float32", window=window, prefix=prefix)
    mask = hide_unwritten(mask, Context(slots=slots, real=real), spec)
    return mask.materialize((0, 3), (0, 12), slots, jnp.arange(12, dtype=jnp.int32)[None])[0].sum(-1).tolist()


def test_slots_that_are_not_written_are_hidden():
    assert hide_unwritten(Causal(), Context(), ()) is not None
    assert hidden(Causal()) == [7, 8, 9]
    assert hidden(Causal() | Prefix(jnp.asarray([11], jnp.int32))) == [9, 9, 9]
    assert hidden(Causal() | Prefix(jnp.asarray([4], jnp.int32))) == [7, 8, 9]
    padded = jnp.asarray([[True, True, False]])
    assert hidden(Causal() | FixedPrefix(11), prefix=11, real=padded)[:2] == [8, 8]


@pytest.mark.parametrize(
    ("mask", "spec", "message"),
    [
        (Causal(), {"window": 4}, "discarded\n.*causal\n.*the last 4 keys"),
        (Causal() & SlidingWindow(5), {"window": 4}, "discarded"),
        (Full(), {}, "a later call writes.*\n.*full\n"),
        (Causal() | FixedPrefix(5), {"prefix": 4}, "a later call writes"),
        (Chunks(5), {"window": 5}, "a later call writes"),
    ],
)
def test_a_cache_refuses_a_mask_that_its_spec_does_not_allow(mask, spec, message):
    with pytest.raises(RequestError, match=message):
        hidden(mask, **spec)


def test_a_server_cannot_use_a_prefix_of_unknown_length():
    slots = PagedSlots.from_slots(jnp.zeros((1, 1), jnp.int32), 1, 4, 4)
    mask = Causal() | Prefix(jnp.asarray([3], jnp.int32))
    with pytest.raises(RequestError, match=r"paged cannot attend under this mask\n.*prefix\)\n.*\n.*use FixedPrefix"):
        paged_mask(mask, slots, (1, 1), "paged")
    assert paged_mask(mask, jnp.zeros((1, 1), jnp.int32), (1, 1), "paged") is mask
