"""Shorten the cycles of different layers in a stack, so that a few layers contain each kind."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from axlearn_core.config import find, get, patch
from axlearn_plugins_transformer.alternate import Alternate, layer_configs
from axlearn_plugins_transformer.transformer import Decoder

LONG = 8
"""Shortest cycle of layers that is shortened, with the layers before it. Two periods of shorter ones are small enough."""


def shorten_cycles(config: Any) -> Any:
    """Return a config whose long cycles have one layer of each kind, in the order of their first occurrence.

    The number of layers does not change. A kind is a combination of components, such as attention with experts. Many hybrid models
    have no short period, because their few layers with attention are spread among recurrent layers.

    Args:
        config: A `Trainer.Config`.
    """
    changes: dict[str, Any] = {}
    for path, decoder in find(config.model, Decoder.Config).items():
        slots = _alternates(decoder.layer)
        if not any(len(slot.first) + len(slot.children) >= LONG for slot in slots.values()):
            continue
        kinds = [repr(layer) for layer in layer_configs(decoder.layer, decoder.num_layers)]
        kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        if 2 * len(kept) >= len(kinds):
            continue
        prefix = ".".join(filter(None, ("model", path)))
        changes |= {f"{prefix}.layer.{name}": _select(slot, kept) for name, slot in slots.items()}
    return patch(config, changes)


def _alternates(layer: Any) -> dict[str, Alternate]:
    """Return the alternates of a layer that are not part of another one, by path."""
    found: dict[str, Alternate] = {}
    for path, node in find(layer, Alternate).items():
        if not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = node
    return found


def _select(slot: Alternate, layers: Sequence[int]) -> Alternate:
    """Return an alternate that cycles through the nodes of some layers."""
    return attrs.evolve(slot, first=(), children=tuple(slot.select(layer) for layer in layers))


def cycle_lengths(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the path and the length of each cycle of layers."""
    for path in find(config.model, Alternate):
        yield f"model.{path}.children", len(get(config, f"model.{path}").children)
