"""Shorten the cycles of different layers in a stack, so that a few layers contain each kind."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from axlearn_core.config import find, get, patch
from axlearn_plugins_transformer.alternate import Alternate, find_pattern, layer_configs, shortest_cycle
from axlearn_plugins_transformer.transformer import Decoder

LONG, LONG_OF_TWO = 8, 4
"""Shortest cycle of layers that is shortened, with the layers before it: in general, and if there are two kinds of layers.

Two periods of shorter ones are small enough. Families of Hugging Face can seldom express another order of more kinds.
"""


def shorten_cycles(config: Any, *, irregular: bool = False) -> Any:
    """Return a config whose long cycles have one layer of each kind, in the order of their first occurrence.

    A kind is a combination of components, such as attention with experts. Many hybrid models have no short period, because their
    few layers with attention are spread among recurrent layers.

    Args:
        config: A `Trainer.Config`.
        irregular: Whether to make a stack of which a scan runs only a part: two periods, one more layer of the first kind, and one
            layer of each kind. Otherwise, the kinds that a scan runs occur twice, and the number of layers only changes if other
            kinds follow them.
    """
    changes: dict[str, Any] = {}
    for path, decoder in find(config.model, Decoder.Config).items():
        slots = _alternates(decoder.layer)
        longest = max((len(slot.first) + len(slot.children) for slot in slots.values()), default=0)
        if longest < LONG_OF_TWO:
            continue
        kinds = [repr(layer) for layer in layer_configs(decoder.layer, decoder.num_layers)]
        layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        if longest < LONG and len(layers) > 2:
            continue
        lead, end = _find_scanned(kinds, layers)
        cycle, after = layers[lead:end], layers[end:]
        orders = [[*layers[:lead], *2 * [*cycle[i:], *cycle[:i]], *after] for i in range(len(cycle))]
        count = len(orders[0]) if after else decoder.num_layers
        if irregular:
            lead, orders = 0, [[*layers, *layers, layers[0], *layers]]
            count = len(orders[0])
        if len(orders[0]) >= len(kinds):
            continue
        # Without leading nodes in slots that have none, families can express the layers.
        most = len(orders[0]) if irregular else len(cycle)
        nodes = [{name: [slot.select(i) for i in order] for name, slot in slots.items()} for order in orders]
        fits = (n for n in nodes if all(s.first or len(shortest_cycle(n[name])) <= most for name, s in slots.items()))
        chosen = next(fits, nodes[0])
        prefix = ".".join(filter(None, ("model", path)))
        changes |= {f"{prefix}.layer.{name}": _fill(slot, chosen[name], lead, most) for name, slot in slots.items()}
        changes[f"{prefix}.num_layers"] = count
    return patch(config, changes)


def _alternates(layer: Any) -> dict[str, Alternate]:
    """Return the alternates of a layer that are not part of another one, by path."""
    alternates: dict[str, Alternate] = {}
    for path, node in find(layer, Alternate).items():
        if not any(path.startswith(f"{outer}.") for outer in alternates):
            alternates[path] = node
    return alternates


def _find_scanned(kinds: Sequence[str], first_layers: Sequence[int]) -> tuple[int, int]:
    """Return the range of the kinds that a scan runs: those in the part of the stack that has the repeated layers.

    A part ends where no earlier kind occurs again, such as after the dense layers below those with experts.

    Args:
        kinds: Kind of each layer.
        first_layers: First layer of each kind, in order.
    """
    latest = {kind: layer for layer, kind in enumerate(kinds)}
    ends = itertools.accumulate((latest[kinds[layer]] for layer in first_layers), max)  # of each kind and all before it
    starts = [*first_layers[1:], len(kinds)]
    bounds = [number for number, (end, start) in enumerate(zip(ends, starts, strict=True), start=1) if end < start]
    first = kinds[find_pattern([kinds.index(kind) for kind in kinds]).lead]  # kind of the first repeated layer
    scanned = list(dict.fromkeys(kinds)).index(first)
    return next((lead, end) for lead, end in itertools.pairwise([0, *bounds]) if scanned < end)


def _fill(slot: Alternate, nodes: Sequence[Any], lead: int, most: int) -> Alternate:
    """Return an alternate with these nodes: a cycle of at most `most`, or leading nodes and a cycle of the others."""
    cycle = shortest_cycle(nodes)
    if slot.first or len(cycle) > most:
        return attrs.evolve(slot, first=tuple(nodes[:lead]), children=tuple(shortest_cycle(nodes[lead:])))
    return attrs.evolve(slot, children=tuple(cycle))


def cycle_lengths(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the path and the length of each cycle of layers."""
    for path in find(config.model, Alternate):
        yield f"model.{path}.children", len(get(config, f"model.{path}").children)
