"""Shorten the cycles of different layers in a stack, so that a few layers contain each kind."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from axlearn_core.config import find, get, patch
from axlearn_plugins_transformer.alternate import Alternate, layer_configs
from axlearn_plugins_transformer.transformer import Decoder

LONG = 4
"""Shortest cycle of layers that is shortened, with the layers before it. Two periods of shorter ones are small enough."""


def shorten_cycles(config: Any, *, irregular: bool = False) -> Any:
    """Return a config whose long cycles have one layer of each kind, in the order of their first occurrence.

    The number of layers does not change. A kind is a combination of components, such as attention with experts. Many hybrid models
    have no short period, because their few layers with attention are spread among recurrent layers.

    Args:
        config: A `Trainer.Config`.
        irregular: Whether to make cycles of which a scan runs only a part: two periods, one more layer of the first kind, and one
            layer of each kind.
    """
    changes: dict[str, Any] = {}
    for path, decoder in find(config.model, Decoder.Config).items():
        slots = _alternates(decoder.layer)
        if not any(len(slot.first) + len(slot.children) >= LONG for slot in slots.values()):
            continue
        kinds = [repr(layer) for layer in layer_configs(decoder.layer, decoder.num_layers)]
        layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        lead = _count_leading(kinds, layers)
        if irregular:
            layers = [*layers, *layers, layers[0], *layers]
            lead = len(layers) - 1  # the cycle is the last layer
        if lead + 2 * (len(layers) - lead) >= len(kinds):
            continue
        prefix = ".".join(filter(None, ("model", path)))
        changes |= {f"{prefix}.layer.{name}": _select(slot, layers, lead) for name, slot in slots.items()}
    return patch(config, changes)


def _alternates(layer: Any) -> dict[str, Alternate]:
    """Return the alternates of a layer that are not part of another one, by path."""
    alternates: dict[str, Alternate] = {}
    for path, node in find(layer, Alternate).items():
        if not any(path.startswith(f"{outer}.") for outer in alternates):
            alternates[path] = node
    return alternates


def _count_leading(kinds: Sequence[str], first_layers: Sequence[int]) -> int:
    """Return how many kinds come before all others, such as a dense layer below those with experts.

    Args:
        kinds: Kind of each layer.
        first_layers: First layer of each kind.
    """
    latest = {kind: layer for layer, kind in enumerate(kinds)}
    for number, (layer, following) in enumerate(itertools.pairwise(first_layers)):
        if latest[kinds[layer]] > following:
            return number
    return len(first_layers) - 1


def _select(slot: Alternate, layers: Sequence[int], lead: int) -> Alternate:
    """Return an alternate with the nodes of some layers: the leading ones, and a cycle of the others."""
    chosen = tuple(slot.select(layer) for layer in layers)
    return attrs.evolve(slot, first=chosen[:lead], children=chosen[lead:])


def cycle_lengths(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the path and the length of each cycle of layers."""
    for path in find(config.model, Alternate):
        yield f"model.{path}.children", len(get(config, f"model.{path}").children)
