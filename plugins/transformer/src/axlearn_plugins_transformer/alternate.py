"""Stacks of different layers, which an `Alternate` in any slot of the layer config creates.

    feed_forward: {type: alternate, children: [{type: gated-feed-forward}, {type: mixture-of-experts}]}

Layers of one kind share a stack of parameters. The order of the kinds is static.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs

from axlearn_core.config import REQUIRED, Node, find, node
from axlearn_core.config.tree import children, with_children
from axlearn_core.errors import ConfigError, Problem


@node
class Alternate(Node[Any]):
    """Layer `i` of the stack uses `first[i]`. Later layers cycle through `children`.

    A layer for which it is None has nothing in this slot, such as no position encoding. The slot must be optional.

    Attributes:
        children: Nodes to cycle through, or None.
        first: Nodes of the leading layers, such as the dense layers at the bottom of a DeepSeek model.
    """

    wraps: ClassVar[tuple[str, ...]] = ("first", "children")

    children: tuple[Node[Any] | None, ...] = REQUIRED
    first: tuple[Node[Any] | None, ...] = ()

    def validate(self) -> Iterable[Problem]:
        """Check that there are children."""
        if isinstance(self.children, tuple) and not self.children:
            yield Problem(path="children", message="must not be empty", expected="at least one node")

    def select(self, index: int) -> Node[Any] | None:
        """Return the node for layer `index`, or None."""
        lead = len(self.first)
        return self.first[index] if index < lead else self.children[(index - lead) % len(self.children)]

    def build(self, **_: object) -> Any:
        """Raise ConfigError, because only a stack of layers can resolve an `alternate`."""
        raise ConfigError(
            Problem(
                path="model",
                message="an `alternate` must be below a stack of layers",
                fix="move it below decoder.layer, or replace it with one of its children",
            )
        )


def layer_configs(layer: Node[Any], num_layers: int) -> list[Node[Any]]:
    """Return the config of each layer, with each `Alternate` replaced by the layer's node.

    An `Alternate` within a node of another `Alternate` counts only layers whose node has the same type. For example, if every
    fourth layer has attention, and every second attention layer has a window, every eighth layer has a window.
    """
    return [_resolve(layer, i) for i in range(num_layers)]


def _resolve(part: Any, index: int) -> Any:
    if isinstance(part, Alternate):
        chosen = part.select(index)
        return _resolve(chosen, sum(type(part.select(i)) is type(chosen) for i in range(index)))
    try:
        return with_children(part, {name: _resolve(child, index) for name, child in children(part).items()})
    except ConfigError as error:  # a slot that is not optional
        message = f"layer {index} of the stack has no valid component in this slot"
        fix = "use a component for every layer in the `alternate`; only an optional slot may be null"
        raise ConfigError(
            attrs.evolve(p, message=f"{message}: {p.message}", fix=p.fix or fix) for p in error.problems
        ) from None


def shortest_cycle(values: Sequence[Any]) -> list[Any]:
    """Return the shortest sequence that the values of the layers repeat."""
    sizes = range(1, len(values) + 1)
    period = next(n for n in sizes if all(value == values[i % n] for i, value in enumerate(values)))
    return [*values[:period]]


def shortest_parts(values: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """Return the leading values and the cycle of the others, with the fewest values in both together."""
    parts = [(values[:lead], shortest_cycle(values[lead:])) for lead in range(len(values))]
    return min(parts, key=lambda part: len(part[0]) + len(part[1]))


def with_shortest_cycles(layer: Any, num_layers: int) -> Any:
    """Rewrite each `Alternate` in the config of a layer in its shortest form, which gives the same `num_layers` layers.

    An `Alternate` of other ones stays as it is, because they count the layers of one type.
    """
    if not isinstance(layer, Alternate):
        return with_children(layer, {name: with_shortest_cycles(n, num_layers) for name, n in children(layer).items()})
    nodes = [layer.select(i) for i in range(num_layers)]
    if any(find(node, Alternate) for node in nodes):
        return layer
    first, cycle = shortest_parts(nodes)
    return cycle[0] if not first and len(cycle) == 1 else attrs.evolve(layer, first=tuple(first), children=tuple(cycle))


class LayerPattern(NamedTuple):
    """The execution order of kinds: leading layers, a repeated period, a remainder.

    Attributes:
        lead: Number of leading layers.
        period: Number of layers in one period.
        repeats: Number of times the period is repeated.
    """

    lead: int
    period: int
    repeats: int


def find_pattern(kinds: Sequence[int]) -> LayerPattern:
    """Return the pattern that compiles the fewest layers."""
    length = len(kinds)
    if len(set(kinds)) == 1:
        return LayerPattern(0, 1, length)
    best = LayerPattern(0, length, 1)
    for lead in range(length):
        for period in range(1, length - lead):
            end = lead + period
            while end < length and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - lead) // period
            cost = length - (repeats - 1) * period
            if cost < length - (best.repeats - 1) * best.period:
                best = LayerPattern(lead, period, repeats)
    return best
