"""Layers whose caches differ from what they declare: one error in generation, and one in the server."""

import jax
import pytest
from flax import nnx

from axlearn_core.config import node, patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.generate import Generator
from support import serving_models
from support.mutants.recurrent import Average


class Wrapping(Average):
    @node
    class Config(Average.Config):
        pass

    def mix(self, x, sequences, state):
        y, after = super().mix(x, sequences, state)
        return y, {"state": after}


class Narrow(Average):
    @node
    class Config(Average.Config):
        pass

    def mix(self, x, sequences, state):
        y, after = super().mix(x, sequences, state)
        return y, jax.tree.map(lambda s: s[..., 1:], after)


class Forgetful(Average):
    @node
    class Config(Average.Config):
        pass

    def __call__(self, x, context, cache=None):
        return super().__call__(x, context, cache)[0], None


LAYERS = {
    "structure": Wrapping.Config(),
    "shape": Narrow.Config(),
    "none": Forgetful.Config(),
    "dtype": Average.Config(wrong="dtype"),
}


def make(layer):
    small = patch(resolve("quickstart").config, serving_models.SMALL)
    config = patch(small, {"model.decoder.layer.attention": layer})
    return config.model.build(rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", LAYERS)
def test_generation_names_the_layer(name):
    owner = type(LAYERS[name]).owner.__name__
    with pytest.raises(RequestError, match=rf"{owner} returned a cache with other arrays than it declares"):
        next(Generator(make(LAYERS[name]))([1, 2], max_tokens=2))


@pytest.mark.parametrize("name", ["structure", "shape", "none"])
def test_a_server_says_what_was_returned(name):
    message = "returned (a cache with other arrays|states of other shapes) than it declares\n *got: .*\n *expected: .*"
    with pytest.raises(RequestError, match=message):
        serve(make(LAYERS[name]), set={"runner.max_rows": 1, "runner.max_context": 32}, warm_up=True)


def test_a_server_keeps_no_array_per_token():
    with pytest.raises(RequestError, match=r"cannot keep the cache of layer 0\n *got: CacheEntry\(per='token'"):
        serve(make(Average.Config(wrong="per")), set={"runner.max_rows": 1, "runner.max_context": 32}, warm_up=False)
