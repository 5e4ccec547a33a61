"""Components that do not implement the protocol of their slot."""

from typing import Protocol

import pytest

from axlearn_core.config import REQUIRED, Configurable, Node, check, node
from axlearn_core.errors import ConfigError
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.attention_variants.latent_cache import ContiguousLatentCache
from axlearn_plugins_transformer.kv_cache import ContiguousCache


class Reader(Protocol):
    """A slot's protocol."""

    def __call__(self, path, limit=None): ...

    def close(self): ...


class Part(Configurable):
    """A component without methods."""

    def __init__(self, cfg):
        self.cfg = cfg

    def close(self):
        pass


class Exact(Part):
    def __call__(self, path, limit=None):
        pass


class WithoutOption(Part):
    def __call__(self, path):
        pass


class Flexible(Part):
    def __call__(self, *arguments, verbose=False):
        pass


class Static(Part):
    @staticmethod
    def __call__(path, limit, more):
        pass


class Greedy(Part):
    def __call__(self, path, limit, encoding):
        pass


class Deaf(Part):
    def __call__(self):
        pass


class Home(Configurable):
    @node
    class Config(Configurable.Config["Home"]):
        reader: Node[Reader] = REQUIRED


@pytest.mark.parametrize("cls", [Exact, WithoutOption, Flexible, Static])
def test_a_component_with_the_methods_of_the_protocol_fits(cls):
    check(Home.Config(reader=cls.Config()))


@pytest.mark.parametrize(
    ("cls", "actual", "expected"),
    [
        (Part, "Part, without __call__", "__call__, close"),
        (Greedy, r"Greedy, with __call__\(path, limit, encoding\)", r"__call__\(path, limit=None\)"),
        (Deaf, r"Deaf, with __call__\(\)", r"__call__\(path, limit=None\)"),
    ],
)
def test_a_component_with_other_methods_is_refused(cls, actual, expected):
    with pytest.raises(ConfigError, match=rf"reader: .*\n.*got: .*{actual}\n.*expected: a component with {expected}"):
        check(Home.Config(reader=cls.Config()))


def test_a_cache_of_latents_does_not_fit_a_layer_with_keys():
    check(Attention.Config(num_heads=4, kv_cache=ContiguousCache.Config()))
    with pytest.raises(ConfigError, match="kv_cache: ContiguousLatentCache does not implement KVCache"):
        check(Attention.Config(num_heads=4, kv_cache=ContiguousLatentCache.Config()))
