"""Layers that use the keys of others, per-layer embeddings, and layers with two feed-forward layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import check, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.nn.remat import Remat
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.extended_layer import ExtendedTransformerLayer
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_transformer.paged_cache import PagedCache
from axlearn_plugins_transformer.per_layer import PerLayerEmbedding, PerLayerGate
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

NORM, BARE = RMSNorm.Config(), RMSNorm.Config(weight=False)
SIZES = {"num_heads": 4, "qk_norm": NORM, "position": RotaryEmbedding.Config(), "scale": 0.2}
NEAR = Attention.Config(**SIZES, num_kv_heads=2, head_dim=4, window=4, value_norm=BARE, kv_name="near")
WIDE = Attention.Config(**SIZES, num_kv_heads=1, head_dim=8, value=None, value_norm=BARE, kv_name="wide")
NEAR_READER = Attention.Config(**SIZES, num_kv_heads=2, head_dim=4, window=4, key=None, value=None, kv_source="near")
WIDE_READER = Attention.Config(**SIZES, num_kv_heads=1, head_dim=8, key=None, value=None, kv_source="wide")
LAYER = ExtendedTransformerLayer.Config(
    attention=Alternate(first=(NEAR, WIDE), children=(NEAR_READER, WIDE_READER)),
    feed_forward=GatedFeedForward.Config(hidden_dim=8),
    second_feed_forward=GatedFeedForward.Config(hidden_dim=12),
    post_norm=NORM,
    branch_norm=NORM,
    per_layer_gate=PerLayerGate.Config(dim=4),
    output_scale=True,
)
MODEL = CausalLM.Config(
    vocab_size=32,
    decoder=Decoder.Config(num_layers=6, hidden_dim=16, layer=LAYER, per_layer=PerLayerEmbedding.Config(dim=4)),
)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def part(cfg, **offered):
    return cfg.build(rngs=nnx.Rngs(0), precision=Precision(), **offered)


def rms(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def modes():
    """Compute loss and gradients of one set of parameters in several modes."""
    remat = {"decoder.stack.remat": Remat.Config(save=("query",))}
    edits = {"scan": {}, "unrolled": {"decoder.stack.mode": "unrolled"}, "remat": remat}
    state, results = None, {}
    for name, edit in edits.items():
        model = patch(MODEL, edit).build(rngs=nnx.Rngs(0))
        graph, fresh = nnx.split(model)
        state = fresh if state is None else state

        def loss(state, graph=graph):
            return nnx.merge(graph, state).loss(BATCH)[0]

        results[name] = jax.jit(jax.value_and_grad(loss, allow_int=True))(state)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["unrolled", "remat"])
def test_shared_keys_pass_through_a_scan(modes, mode):
    (loss, gradients), (expected, others) = modes[mode], modes["scan"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), gradients, others)


@pytest.mark.slow
def test_the_keys_that_others_use_get_their_gradients(modes):
    gradients = nnx.to_flat_state(modes["unrolled"][1])
    keys = {".".join(map(str, path)): v.get_value() for path, v in gradients if "key" in path}
    assert keys
    assert all(np.abs(value).max() > 1e-4 for value in keys.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "paged", "paged-int8"])
def test_chunks_with_a_cache_are_the_whole_row(build, run, layout):
    cfg = MODEL
    if layout != "contiguous":
        caches = {
            f"decoder.layer.attention.{slot}.*.kv_cache": PagedCache.Config(page_size=4)
            for slot in ("first", "children")
        }
        cfg = patch(cfg, caches)
    if layout == "paged-int8":  # more layers of a random model amplify the rounding
        cfg = patch(cfg, {"decoder.layer.attention.**.kv_cache.store": "int8", "decoder.num_layers": 3})
    model = build(cfg)
    expected = run(model, TOKENS)
    separate = model.unstacked()
    cache, results = separate.init_cache(2, 16), []
    assert [len(jax.tree.leaves(layer)) > 0 for layer in cache.layers[:3]] == [True, True, False]
    for begin, end in ((0, 5), (5, 11), (11, 12)):
        logits, cache = run(separate, TOKENS[:, begin:end], cache=cache)
        results.append(logits)
    error = np.abs(np.concatenate(results, 1) - expected).max()
    assert error < (0.3 if layout == "paged-int8" else 1e-4)


@pytest.mark.slow
def test_packed_documents_are_separate(build, run):
    model = build(MODEL)
    positions = np.asarray([[*range(5), *range(7)]] * 2, np.int32)
    segments = np.asarray([[1] * 5 + [2] * 7] * 2, np.int32)
    packed = run(model, TOKENS, positions, segments)
    alone = [run(model, TOKENS[:, :5]), run(model, TOKENS[:, 5:])]
    np.testing.assert_allclose(packed, np.concatenate(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_last_layer_may_be_split_when_it_uses_the_keys_of_another(build, run):
    plain = TransformerLayer.Config(
        attention=Alternate(first=(WIDE,), children=(WIDE_READER,)), feed_forward=LAYER.feed_forward
    )
    model = build(patch(MODEL, {"decoder.layer": plain, "decoder.per_layer": None, "decoder.num_layers": 2}))
    separate, tokens = model.unstacked(), TOKENS[:, :6]
    hidden, _ = run(separate, tokens, separate.init_cache(2, 8), call=lambda m, t, c: m.decoder.begin(t, Context(), c))
    logits = run(separate, hidden, call=lambda m, x: m.logits(m.decoder.finish(x)))
    np.testing.assert_allclose(logits, run(model, tokens), rtol=1e-4, atol=1e-5)


def test_a_layer_adds_its_parts_in_order():
    cfg = patch(LAYER, {"attention": WIDE, "output_scale": True})
    layer = part(cfg, input_dim=16)
    layer.output_scale[...] = jnp.full(1, 0.5)
    layer.second_branch_norm.weight[...] = jnp.full(16, 2.0)
    x, own = normal(1, 3, 16), normal(1, 3, 4, seed=1)
    context = Context(layer_inputs={"per_layer": own})
    y, _ = layer.attention_half(x, context)
    both = rms(layer.feed_forward(layer.feed_forward_norm(y))) + 2 * rms(np.asarray(layer.second_feed_forward(y)))
    y = y + rms(both)
    gate = layer.per_layer_gate
    hidden = jax.nn.gelu(y @ gate.gate.weight[...], approximate=True) * own
    expected = 0.5 * (y + rms(np.asarray(hidden @ gate.project.weight[...])))
    np.testing.assert_allclose(layer(x, context)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_may_have_no_feed_forward_half():
    gate = {"second_feed_forward": None, "branch_norm": None, "per_layer_gate": None, "output_scale": False}
    layer, x = part(patch(LAYER, {"attention": WIDE, "feed_forward": None, **gate}), input_dim=16), normal(1, 3, 16)
    context = Context(layer_inputs={})
    np.testing.assert_array_equal(layer(x, context)[0], layer.attention_half(x, context)[0])
    with pytest.raises(ConfigError, match=r"(?s)second_feed_forward.*requires feed_forward"):
        part(patch(LAYER, {"attention": WIDE, "feed_forward": None}), input_dim=16)


def test_per_layer_embeddings_follow_the_formula():
    layer = part(PerLayerEmbedding.Config(dim=4), vocab_size=8, input_dim=6, num_layers=3)
    tokens, x = np.asarray([[1, 5]], np.int32), normal(1, 2, 6)
    table = np.asarray(layer.embedding.weight[...])[tokens].reshape(1, 2, 3, 4) * 2
    projected = rms((x @ np.asarray(layer.projection.weight[...]) / 6**0.5).reshape(1, 2, 3, 4))
    expected = np.moveaxis((projected + table) / 2**0.5, 2, 1)
    np.testing.assert_allclose(layer(tokens, x), expected, rtol=1e-5, atol=1e-6)


def test_values_may_be_the_keys_before_norm_and_positions():
    layer, x = part(WIDE, input_dim=16), normal(1, 3, 16)
    _, key, value = layer.project(x, Context())
    np.testing.assert_allclose(value, rms(np.asarray(layer.key(x))), rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(key - value)).max() > 0.1


WRONG = {
    "two sources": (Attention.Config(num_heads=2, kv_source="kv"), "kv_source", "key, value"),
    "no key": (Attention.Config(num_heads=2, key=None), "key", "must be set without kv_source"),
    "only a second": (
        ExtendedTransformerLayer.Config(feed_forward=None, second_feed_forward=GatedFeedForward.Config()),
        "second_feed_forward",
        "requires feed_forward",
    ),
    "one branch": (
        ExtendedTransformerLayer.Config(attention=WIDE, branch_norm=NORM),
        "branch_norm",
        "second_feed_forward",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_contradict_each_other_are_named(case):
    cfg, path, text = WRONG[case]
    with pytest.raises(ConfigError, match=rf"(?s){path}.*{text}"):
        check(cfg)


def test_keys_that_do_not_fit_are_refused():
    source, x = part(NEAR, input_dim=16), normal(1, 3, 16)
    context = Context()
    with pytest.raises(RequestError, match=r"no earlier layer shares 'near'"):
        part(NEAR_READER, input_dim=16)(x, context)
    source(x, context)
    for edit in ({"window": 5}, {"window": None}, {"num_kv_heads": 4}, {"head_dim": 8}):
        with pytest.raises(
            RequestError, match=r"(?s)keys and values 'near'.*got: 2 heads of size 4, and a window of 4"
        ):
            part(patch(NEAR_READER, edit), input_dim=16)(x, context)
    part(patch(NEAR_READER, {"window": 2}), input_dim=16)(x, context)


def test_a_gate_without_its_input_is_refused():
    gate, x = part(PerLayerGate.Config(dim=4), input_dim=16), normal(1, 3, 16)
    for inputs, got in (({}, "no per-layer inputs"), ({"per_layer": normal(1, 3, 5)}, "inputs of size 5")):
        with pytest.raises(RequestError, match=rf"got: .*{got}\n *fix: set decoder.per_layer"):
            gate(x, inputs)
