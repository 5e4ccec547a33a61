"""The `quantization` feature, and the config edit that stores weights as integers."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import Node, get_fields, node, setting
from axlearn_core.config.tree import children, join, with_children
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_finetune.conversion.target_patterns import matching_paths
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from axlearn_plugins_quantization.weight_only import NoLearner, Storage, WeightOnlyLinear

Tree = TypeVar("Tree", bound=Node[Any])

FORMATS: dict[str, tuple[str, str]] = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
"""Name -> (dtype of weights and activations, dtype of gradients)."""


@node
class Quantization(Feature):
    """Quantized matrix multiplications for training, through qwix.

    The feature quantizes the matmuls in every linear map that matches `target`, a config-path pattern or a list of them
    (default: the whole model). `format` is `int8` (the default) or `fp8`, which uses e4m3 in the forward pass and e5m2 for
    gradients. If layers alternate between several components, all of them match by the path of their slot. Parameters and the
    optimizer do not change. `gradients=false` keeps the matmuls in the backward pass in floating point. `history=128` uses a
    single scale for all activations of a map and a single scale for its weights, from their largest magnitudes in the latest
    128 microbatches. Experts count as linear maps. Embeddings and the output layer do not, so they are not quantized.

    If a linear map is already quantized, the given options are updated. A map with LoRA adapters keeps its adapters, and only
    its base is quantized. The feature has the `tune` stage because it must come after features that wrap linear maps.
    """

    stage = "tune"

    format: Literal["int8", "fp8"] | None = None
    gradients: bool | None = None
    history: int | None = setting(default=None, ge=1)
    target: str | tuple[str, ...] = "model.**"

    def apply(self, cfg: Tree) -> Tree:
        """Replace each matching linear map with a quantized one."""
        return place_nodes(cfg, self.target, self._quantize_map, subject="quantization")

    def _quantize_map(self, part: Linear.Config) -> Node[Any]:
        current = part if isinstance(part, QuantizedLinear.Config) else None
        current_format = next((k for k, v in FORMATS.items() if current and v[0] == current.weights), "int8")
        forward, backward = FORMATS[self.format or current_format]
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


def weight_only_config(
    cfg: Tree, storage: Storage, *, tile_size: int | None, target: str | tuple[str, ...] = "model.**"
) -> Tree:
    """Return the config of the same model with weights stored as integers. The model cannot be trained."""

    def place(part: Linear.Config) -> Node[Any]:
        return WeightOnlyLinear.Config(**_fields(part), storage=storage, tile_size=tile_size)

    result: Any = place_nodes(cfg, target, place, subject="quantize")
    return attrs.evolve(result, learner=NoLearner.Config())


def place_nodes(cfg: Tree, target: str | tuple[str, ...], place: Callable[[Any], Node[Any]], *, subject: str) -> Tree:
    """Replace each matching core linear map, quantized or not, with `place(node)`.

    Raises:
        ConfigError: A pattern does not match any linear map.
    """
    targets = matching_paths(cfg, target, list(_linears(cfg, "")), subject=subject)

    def visit(value: Any, path: str) -> Any:
        if path in targets:
            return place(value)
        return with_children(value, {k: visit(v, join(path, k)) for k, v in children(value).items()})

    return visit(cfg, "")


def _fields(part: Linear.Config) -> dict[str, Any]:
    return {name: value for name, value in get_fields(part).items() if name in attrs.fields_dict(Linear.Config)}


def _is_linear(value: Any) -> bool:
    return type(value) in (Linear.Config, QuantizedLinear.Config)  # a subclass may override the computation


def _linears(value: Any, path: str) -> Iterator[str]:
    if _is_linear(value):
        yield path
        return
    for name, child in children(value).items():
        yield from _linears(child, join(path, name))
