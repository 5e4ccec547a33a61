"""The feature `quantization`, and the edit that stores weights as integers."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import Node, node
from axlearn_core.config.tree import children, join, with_children
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_quantization.linear import QuantizedLinear
from axlearn_plugins_quantization.weight_only import NoLearner, Storage, WeightOnlyLinear
from axlearn_plugins_runs.targets import chosen

Tree = TypeVar("Tree", bound=Node[Any])

FORMATS: dict[str, tuple[str, str]] = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
"""The format of weights and activations, and that of gradients."""


@node
class Quantization(Feature):
    """Trains with quantized matrix products, through qwix.

    The products of every linear map that `target` fits (a pattern of config paths, or several; by default all of the
    model) are taken in `format`: `int8` (the default), or `fp8`, which is e4m3 forward and e5m2 for gradients. Where layers
    take turns with several components, those are all at the path of the slot. Parameters and optimizer stay as they are.
    `gradients=false` leaves the products of the backward pass in floating point.
    Embeddings and the output layer are no linear maps in this sense, and stay as they are; the experts of a mixture are.

    Linear maps that are quantized already get the options that are given. A map that has LoRA adapters keeps them; what
    they adapt is quantized. It comes after the features that wrap linear maps, so it is of the stage `tune`.
    """

    stage = "tune"

    format: Literal["int8", "fp8"] | None = None
    gradients: bool | None = None
    target: str | tuple[str, ...] = "model.**"

    def apply(self, cfg: Tree) -> Tree:
        """Puts a quantized linear map in the place of each that fits."""
        return placed(cfg, self.target, self._quantized, what="quantization")

    def in_effect(self, cfg: Node[Any]) -> bool:
        """Every linear map that is asked for is quantized as asked."""
        return self.apply(cfg) == cfg

    def _quantized(self, part: Linear.Config) -> Node[Any]:
        there = part if isinstance(part, QuantizedLinear.Config) else None
        before = next((k for k, v in FORMATS.items() if there and v[0] == there.weights), "int8")
        forward, backward = FORMATS[self.format or before]
        keeps = there is None or there.gradients is not None
        options = {
            "weights": forward,
            "activations": forward,
            "gradients": backward if (keeps if self.gradients is None else self.gradients) else None,
        }
        if there is not None:
            given = self.format is not None or self.gradients is not None
            return attrs.evolve(there, **options) if given else there
        return QuantizedLinear.Config(**_fields(part), **options)


def stored(cfg: Tree, storage: Storage, *, tile_size: int | None, target: str | tuple[str, ...] = "model.**") -> Tree:
    """The config of the same model with weights stored as integers, which only serves."""

    def place(part: Linear.Config) -> Node[Any]:
        return WeightOnlyLinear.Config(**_fields(part), storage=storage, tile_size=tile_size)

    made: Any = placed(cfg, target, place, what="quantize")
    return attrs.evolve(made, learner=NoLearner.Config())


def placed(cfg: Tree, target: str | tuple[str, ...], place: Callable[[Any], Node[Any]], *, what: str) -> Tree:
    """The config with `place(node)` for each of the core's linear maps, quantized or not, that a pattern fits.

    Raises:
        ConfigError: a pattern fits none.
    """
    targets = chosen(cfg, target, list(_linears(cfg, "")), what=what)

    def visit(value: Any, path: str) -> Any:
        if path in targets:
            return place(value)
        return with_children(value, {k: visit(v, join(path, k)) for k, v in children(value).items()})

    return visit(cfg, "")


def _fields(part: Linear.Config) -> dict[str, Any]:
    return {a.name: getattr(part, a.name) for a in attrs.fields(Linear.Config)}


def _is_linear(value: Any) -> bool:
    return type(value) in (Linear.Config, QuantizedLinear.Config)  # a subclass may compute something else


def _linears(value: Any, path: str) -> Iterator[str]:
    if _is_linear(value):
        yield path
        return
    for name, child in children(value).items():
        yield from _linears(child, join(path, name))
