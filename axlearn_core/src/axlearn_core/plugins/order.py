"""The order of features: by stage; within a stage as `before` and `after` say, and by name where they say nothing."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from axlearn_core.errors import PluginError
from axlearn_core.plugins.feature import STAGES, Feature
from axlearn_core.plugins.registry import Registry


@attrs.frozen
class Order:
    """Features in the order of their application.

    Attributes:
        names: the features, first to last.
        below: feature -> those of its stage that have a stated place before it, directly or through others.
    """

    names: tuple[str, ...]
    below: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, features: Mapping[str, Feature | type[Feature]], registry: Registry) -> "Order":
        """The order of these features, which does not depend on the order of the arguments.

        A name in `before` or `after` that is not among `features` orders nothing.

        Raises:
            PluginError: the features say that they come before one another, or against the order of their stages.
        """
        stated = _stated_order(features, registry)
        names: list[str] = []
        below: dict[str, frozenset[str]] = {}
        for stage in STAGES:
            remaining = sorted(n for n, feature in features.items() if feature.stage == stage)
            while remaining:
                following = next((n for n in remaining if not stated[n].keys() & {*remaining}), None)
                if following is None:
                    raise _cycle(remaining, stated)
                remaining.remove(following)
                direct = {n for n in stated[following] if features[n].stage == stage}
                below[following] = frozenset(direct).union(*(below[n] for n in direct))
                names.append(following)
        return cls(tuple(names), below)


def _stated_order(features: Mapping[str, Feature | type[Feature]], registry: Registry) -> dict[str, dict[str, str]]:
    """Feature -> those that come before it, each with who says so."""
    stated: dict[str, dict[str, str]] = {name: {} for name in features}
    for first, second, by in sorted(_statements(features)):
        title = f"{by} ({registry.entry('features', by).origin})"
        if STAGES.index(features[first].stage) > STAGES.index(features[second].stage):
            raise PluginError(
                f"the feature {title} says that {first!r} comes before {second!r}, against the order of their stages\n"
                f"    got: {first} of the stage {features[first].stage!r}, {second} of {features[second].stage!r}\n"
                f"    expected: stages in the order {', '.join(STAGES)}\n"
                "    fix: leave one of them out, or give one of them another stage"
            )
        stated[second].setdefault(first, title)
    return stated


def _statements(features: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(the earlier feature, the later one, the one that says so)."""
    for name, feature in features.items():
        yield from ((name, other, name) for other in feature.before if other in features)
        yield from ((other, name, name) for other in feature.after if other in features)


def _cycle(remaining: list[str], stated: Mapping[str, Mapping[str, str]]) -> PluginError:
    """The error for features whose order has a cycle."""
    path = [remaining[0]]
    while True:  # each has another before it, so going back comes to one that was there
        earlier = min(stated[path[-1]].keys() & {*remaining})
        if earlier in path:
            cycle = [earlier, *reversed(path[path.index(earlier) :])]
            break
        path.append(earlier)
    lines = [
        f"    {first} before {second}, says {stated[second][first]}" for first, second in itertools.pairwise(cycle)
    ]
    return PluginError(
        "the features say that they come before one another\n" + "\n".join(lines) + "\n    fix: leave one of them out"
    )
