"""Installed components, sorted by the interface that they implement, and toy values for their required fields."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import equinox
from flax import linen

from axlearn_core.config import Decoder, Node, configure, find_missing, patch
from axlearn_core.contracts import parts
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.kernels.op import Op
from axlearn_core.kernels.selection import reference
from axlearn_core.nn.layer import Layer
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import registry
from axlearn_core.train.evaluators import Evaluator
from axlearn_core.train.loop import Loop
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache
from axlearn_plugins_transformer.attention_variants.lightning_indexer import LightningIndexer, SharedSelection
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_testing.contracts import D

INDEXERS = (LightningIndexer, SharedSelection)

TOY = {
    "num_heads": 8,
    "num_layers": 2,
    "hidden_dim": 32,
    "vocab_size": 64,
    "batch_size": 4,
    "sequence_length": 16,
    "num_classes": 8,
    "image_size": 8,
    "patch_size": 4,
}


WRAPPED = {
    "linen-layer": {"module": configure(linen.LayerNorm), "axes": {"*": ("norm",)}},
    "equinox-layer": {"module": configure(equinox.nn.LayerNorm, shape=D), "vmap_axes": 2, "axes": {"*": ("norm",)}},
    "dropout-output": {"base": GatedFeedForward.Config(hidden_dim=32)},
}
"""Values for components that contain another component."""


def toy_config(config: type[Node[Any]], **settings: Any) -> Node[Any]:
    """Return a small config with all required fields set by field name, for any component."""
    node: Any = Decoder(registry()).decode_value(config(), "", settings)
    return patch(
        node, {p.path: TOY[p.path.rpartition(".")[2]] for p in find_missing(node) if p.path.rpartition(".")[2] in TOY}
    )


@functools.cache
def components() -> dict[str, type[Node[Any]]]:
    """Return name -> config class of all registered components."""
    return {e.name: registry().component(e.name) for e in registry().entries("components")}


def select_configs(test: Callable[[type], bool]) -> dict[str, Node[Any]]:
    """Return name -> toy config of the components whose class passes a check."""
    return {n: _toy(n, c) for n, c in components().items() if isinstance(c.owner, type) and test(c.owner)}


@functools.cache
def _toy(name: str, config: type[Node[Any]]) -> Node[Any]:
    return patch(toy_config(config), WRAPPED.get(name, {}))


def layers() -> dict[str, Node[Any]]:
    """Return the components that are layers. Indexers belong to a layer of attention, and are tested with it."""
    return select_configs(lambda owner: issubclass(owner, Layer) and owner not in INDEXERS)


def make_suites(base: type, configs: dict[str, Node[Any]], **more: Any) -> dict[str, type]:
    """Return a test class for each component, such as `TestRmsNorm` for `rms-norm`."""
    return {
        f"Test{name.title().replace('-', '')}": type(f"Test{name}", (base,), {"config": config, **more})
        for name, config in configs.items()
    }


PROTOCOLS = (
    parts.Input, parts.Learner, parts.Checkpointer, parts.Tracker, parts.Objective, parts.Tokenizer, parts.Profiler,
    parts.Watchdog, parts.ProcessGroup, Loop, Evaluator, KVCache, LatentCache,
)  # fmt: skip


def count_methods(owner: type, protocol: Any) -> int:
    """Return the number of methods of a protocol if a class has all of them with the same arguments, else 0."""
    methods = {n: f for n, f in vars(protocol).items() if inspect.isfunction(f) and not n.startswith("_")}
    attributes = {n: getattr(owner, n, None) for n in methods}
    fits = all(inspect.isfunction(attributes[n]) and _arguments(attributes[n])[: len(_arguments(f))] == _arguments(f)
               for n, f in methods.items())  # fmt: skip
    return len(methods) * fits


def _arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def implementations(protocol: Any) -> dict[str, Node[Any]]:
    """Return the components that implement a protocol and no larger one."""
    return select_configs(
        lambda owner: (
            bool(count_methods(owner, protocol)) and max(PROTOCOLS, key=lambda p: count_methods(owner, p)) is protocol
        )
    )


def kernels() -> dict[type[Op[Any]], list[KernelImplementation]]:
    """Return op -> its declared kernels and its reference."""
    by_op: dict[type[Op[Any]], list[KernelImplementation]] = {}
    for _, declared in host().call("axlearn_kernels"):
        for implementation in declared:
            module, _, name = implementation.op.partition(":")
            op = getattr(importlib.import_module(module), name)
            assert issubclass(op, Op), implementation
            assert op.path() == implementation.op, "a kernel must name the module that defines its op"
            by_op.setdefault(op, [reference(op)]).append(implementation)
    return by_op
