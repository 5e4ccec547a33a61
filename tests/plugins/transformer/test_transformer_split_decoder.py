import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import node
from axlearn_core.nn.layer import Context
from axlearn_plugins_transformer.causal_lm import SplitDecoder
from axlearn_plugins_transformer.dropout import DropoutTransformerLayer
from axlearn_plugins_transformer.layer_roles import SplitLayerRole
from axlearn_plugins_transformer.stack import Stack
from axlearn_plugins_transformer.transformer import Cache, Decoder, TransformerLayer


@pytest.mark.slow
def test_a_decoder_finishes_only_the_tokens_that_somebody_asks_for(tiny, build):
    decoder, tokens = build(tiny()).decoder.unstacked(), jnp.asarray([[3, 1, 4, 1, 5, 9, 2]])
    assert isinstance(decoder, SplitDecoder)
    expected, after = decoder(tokens, Context(), Cache.empty(decoder.cache_spec(), 1, 16))
    begun, cache = decoder.begin(tokens, Context(), Cache.empty(decoder.cache_spec(), 1, 16))
    jax.tree.map(np.testing.assert_array_equal, cache, after)
    assert not np.allclose(begun, decoder.finish(begun))
    for some in ([6], [1, 4], list(range(7))):
        np.testing.assert_allclose(decoder.finish(begun[:, some]), expected[:, some], rtol=1e-5, atol=1e-5)


def run(decoder, tokens, length):
    """Return the results of `begin` and of the whole decoder, each from a program of its own."""
    empty = Cache.empty(decoder.cache_spec(), 1, length)
    begin = jax.jit(lambda tokens, cache: decoder.begin(tokens, Context(), cache)[0])
    whole = jax.jit(lambda tokens, cache: decoder(tokens, Context(), cache)[0])
    return begin(tokens, empty), whole(tokens, empty)


def finish(decoder, begun):
    return jax.jit(decoder.finish)(begun)


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("layers", [1, 2])
def test_stacked_layers_and_a_single_one_are_run_whole(tiny, build, layers):
    decoder = build(tiny({"decoder.num_layers": layers})).decoder
    decoder = decoder.unstacked() if layers == 1 else decoder
    tokens = jnp.asarray([[3, 1, 4]])
    begun, expected = run(decoder, tokens, 4)
    np.testing.assert_array_equal(begun, expected)
    np.testing.assert_array_equal(finish(decoder, begun), expected)


class AddingLayer(TransformerLayer):
    def __call__(self, x, context, cache=None):
        y, cache = super().__call__(x, context, cache)
        return y + 3 * x, cache


class ReversedStack(Stack):
    def __call__(self, layers, x, context, cache=None):
        x, cache = super().__call__(nnx.List(layers[::-1]), x, context, cache[::-1])
        return x, cache[::-1]


class NegatedDecoder(Decoder):
    def __call__(self, tokens, context, cache=None):
        x, cache = super().__call__(tokens, context, cache)
        return -x, cache


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["layer", "stack", "decoder"])
def test_what_a_subclass_computes_is_not_taken_apart(tiny, changed):
    def of_class(kind, part):
        return kind.Config(**{field.name: getattr(part, field.name) for field in attrs.fields(type(part))})

    edits = {
        "layer": {"decoder.layer": of_class(AddingLayer, tiny().decoder.layer)},
        "stack": {"decoder.stack": ReversedStack.Config()},
        "decoder": {"decoder": of_class(NegatedDecoder, tiny().decoder)},
    }
    cfg = tiny(edits[changed])
    plain, decoder = (c.build(rngs=nnx.Rngs(0)).decoder.unstacked() for c in (tiny(), cfg))
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    expected, _ = decoder(tokens, Context(), Cache.empty(decoder.cache_spec(), 1, 8))
    assert not np.allclose(expected, plain(tokens, Context(), Cache.empty(plain.cache_spec(), 1, 8))[0], atol=1e-2)
    begun, _ = decoder.begin(tokens, Context(), Cache.empty(decoder.cache_spec(), 1, 8))
    np.testing.assert_allclose(decoder.finish(begun), expected, rtol=1e-5, atol=1e-5)


class HalvedLayer(TransformerLayer):
    """Changes a half and declares the role again."""

    @node
    class Config(TransformerLayer.Config, SplitLayerRole):
        """Nothing to set."""

    def feed_forward_half(self, x):
        return super().feed_forward_half(x) + 2 * x


class SilentLayer(HalvedLayer):
    """Does not declare the role, so it runs as a whole although it computes the same as its base."""


@pytest.mark.slow_cases("TransformerLayer-True")
@pytest.mark.parametrize(
    ("kind", "apart"),
    [(TransformerLayer, True), (DropoutTransformerLayer, True), (HalvedLayer, True), (SilentLayer, False)],
)
def test_a_layer_is_taken_apart_if_its_own_class_states_its_halves(tiny, kind, apart):
    layer = tiny().decoder.layer
    cfg = tiny({"decoder.layer": kind.Config(**{f.name: getattr(layer, f.name) for f in attrs.fields(type(layer))})})
    decoder = cfg.build(rngs=nnx.Rngs(0)).decoder.unstacked()
    decoder.eval()
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    begun, expected = run(decoder, tokens, 8)
    assert np.array_equal(begun, expected) is not apart
    np.testing.assert_allclose(finish(decoder, begun), expected, rtol=1e-5, atol=1e-5)
