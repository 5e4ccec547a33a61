"""The feature `quantization`, and the edit that stores weights as integers."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import Node, fields_of, node, setting
from axlearn_core.config.tree import children, join, with_children
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_finetune.conversion.target_patterns import matching_paths
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from axlearn_plugins_quantization.weight_only import NoLearner, Storage, WeightOnlyLinear

Tree = TypeVar("Tree", bound=Node[Any])

FORMATS: dict[str, tuple[str, str]] = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
"""The format of weights and activations, and that of gradients."""


@node
class Quantization(Feature):
    """Trains with quantized matrix products, through qwix.

    The products of every linear map that `target` fits (a pattern of config paths, or several; by default all of the
    model) are taken in `format`: `int8` (the default), or `fp8`, which is e4m3 forward and e5m2 for gradients. Where layers
    take turns with several components, those are all at the path of the slot. Parameters and optimizer stay as they are.
    `gradients=false` leaves the products of the backward pass in floating point. `history=128` takes one scale for all activations
    of a map and one for its weights, from their largest magnitudes in the latest 128 microbatches.
    Embeddings and the output layer are not linear maps in this sense, and stay as they are; the experts of a mixture are.

    Linear maps that are quantized already get the options that are given. A map that has LoRA adapters keeps them; what
    they adapt is quantized. It comes after the features that wrap linear maps, so it is of the stage `tune`.
    """

    stage = "tune"

    format: Literal["int8", "fp8"] | None = None
    gradients: bool | None = None
    history: int | None = setting(default=None, ge=1)
    target: str | tuple[str, ...] = "model.**"

    def apply(self, cfg: Tree) -> Tree:
        """Puts a quantized linear map in the place of each that fits."""
        return place_nodes(cfg, self.target, self._quantize_map, subject="quantization")

    def _quantize_map(self, part: Linear.Config) -> Node[Any]:
        current = part if isinstance(part, QuantizedLinear.Config) else None
        before = next((k for k, v in FORMATS.items() if current and v[0] == current.weights), "int8")
        forward, backward = FORMATS[self.format or before]
        keeps = current is None or current.gradients is not None
        options = {
            "weights": forward,
            "activations": forward,
            "gradients": backward if (keeps if self.gradients is None else self.gradients) else None,
            "history": self.history or (current.history if current else None),
        }
        if current is not None:
            has_options = any(x is not None for x in (self.format, self.gradients, self.history))
            return attrs.evolve(current, **options) if has_options else current
        return QuantizedLinear.Config(**_fields(part), **options)


def stored(cfg: Tree, storage: Storage, *, tile_size: int | None, target: str | tuple[str, ...] = "model.**") -> Tree:
    """The config of the same model with weights stored as integers, which only serves."""

    def place(part: Linear.Config) -> Node[Any]:
        return WeightOnlyLinear.Config(**_fields(part), storage=storage, tile_size=tile_size)

    result: Any = place_nodes(cfg, target, place, subject="quantize")
    return attrs.evolve(result, learner=NoLearner.Config())


def place_nodes(cfg: Tree, target: str | tuple[str, ...], place: Callable[[Any], Node[Any]], *, subject: str) -> Tree:
    """The config with `place(node)` for each of the core's linear maps, quantized or not, that a pattern fits.

    Raises:
        ConfigError: a pattern fits none.
    """
    targets = matching_paths(cfg, target, list(_linears(cfg, "")), subject=subject)

    def visit(value: Any, path: str) -> Any:
        if path in targets:
            return place(value)
        return with_children(value, {k: visit(v, join(path, k)) for k, v in children(value).items()})

    return visit(cfg, "")


def _fields(part: Linear.Config) -> dict[str, Any]:
    return {name: value for name, value in fields_of(part).items() if name in attrs.fields_dict(Linear.Config)}


def _is_linear(value: Any) -> bool:
    return type(value) in (Linear.Config, QuantizedLinear.Config)  # a subclass may compute something else


def _linears(value: Any, path: str) -> Iterator[str]:
    if _is_linear(value):
        yield path
        return
    for name, child in children(value).items():
        yield from _linears(child, join(path, name))
