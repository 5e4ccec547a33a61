"""Different layers in one stack: `Alternate` stands in any slot below the layer, and each layer takes its turn.

    feed_forward: {type: alternate, children: [{type: gated-feed-forward}, {type: mixture-of-experts}]}

Layers of one kind share a stacked set of parameters; how they follow one another is static.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import attrs

from axlearn_core.config import REQUIRED, Node, map, node
from axlearn_core.errors import ConfigError, Problem


@node
class Alternate(Node[Any]):
    """Layer `i` of the stack has `first[i]` here; after those, `children` take turns.

    Attributes:
        children: every `len(children)`-th layer has the same one.
        first: what the leading layers have instead (the dense layers that begin a DeepSeek model).
    """

    children: tuple[Node[Any], ...] = REQUIRED
    first: tuple[Node[Any], ...] = ()

    def validate(self) -> Iterable[Problem]:
        """Nothing to take turns."""
        if isinstance(self.children, tuple) and not self.children:
            yield Problem(path="children", message="there are none", expected="at least one node")

    def of(self, index: int) -> Node[Any]:
        """What layer `index` has."""
        lead = len(self.first)
        return self.first[index] if index < lead else self.children[(index - lead) % len(self.children)]

    def build(self, **_: object) -> Any:
        """Only a stack of layers can choose."""
        raise ConfigError(
            Problem(
                path="model",
                message="an `alternate` stands where no stack of layers chooses by the layer's number",
                fix="move it below decoder.layer, or put one of its children in its place",
            )
        )


def change_slot(slot: Any, change: Callable[[Any], Any]) -> Any:
    """A slot with each of the nodes that take turns in it changed, or the one that it holds."""
    if not isinstance(slot, Alternate):
        return change(slot)
    first, children = (tuple(change(kind) for kind in kinds) for kinds in (slot.first, slot.children))
    return attrs.evolve(slot, first=first, children=children)


def layer_configs(layer: Node[Any], num_layers: int) -> list[Node[Any]]:
    """The config of each layer: `layer`, with what each `Alternate` in it has for that layer."""

    def at(index: int) -> Node[Any]:
        return map(layer, lambda part: part.of(index) if isinstance(part, Alternate) else part)

    return [at(i) for i in range(num_layers)]


class Plan(NamedTuple):
    """How a sequence of kinds is run: some layers, then a period that repeats, then the rest."""

    lead: int
    period: int
    repeats: int


def plan(kinds: Sequence[int]) -> Plan:
    """The plan with the least code: layers outside the repeats, and one period."""
    length = len(kinds)
    if len(set(kinds)) == 1:
        return Plan(0, 1, length)
    best = Plan(0, length, 1)
    for lead in range(length):
        for period in range(1, length - lead):
            end = lead + period
            while end < length and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - lead) // period
            cost = length - (repeats - 1) * period
            if cost < length - (best.repeats - 1) * best.period:
                best = Plan(lead, period, repeats)
    return best
