"""Order features by stage, then by `before` and `after`, then by name."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.feature import STAGES, Feature
from axlearn_core.plugins.registry import Registry


@attrs.frozen
class Order:
    """The order in which to apply features.

    Attributes:
        names: Names of the features, first to last.
        predecessors: For each feature, the features in its stage that `before` and `after` place ahead of it, directly or
            transitively.
    """

    names: tuple[str, ...]
    predecessors: Mapping[str, frozenset[str]]

    @classmethod
    def from_features(cls, features: Mapping[str, Feature | type[Feature]], registry: Registry) -> "Order":
        """Return the order of the given features. The result does not depend on the order of `features`.

        Names in `before` and `after` that are not in `features` are ignored.

        Raises:
            PluginError: If the constraints form a cycle or contradict the order of the stages.
        """
        constraints = _collect_constraints(features, registry)
        names: list[str] = []
        predecessors: dict[str, frozenset[str]] = {}
        for stage in STAGES:
            remaining = sorted(n for n, feature in features.items() if feature.stage == stage)
            while remaining:
                following = next((n for n in remaining if not constraints[n].keys() & {*remaining}), None)
                if following is None:
                    raise _cycle_error(remaining, constraints)
                remaining.remove(following)
                direct = {n for n in constraints[following] if features[n].stage == stage}
                predecessors[following] = frozenset(direct).union(*(predecessors[n] for n in direct))
                names.append(following)
        return cls(tuple(names), predecessors)


def _collect_constraints(
    features: Mapping[str, Feature | type[Feature]], registry: Registry
) -> dict[str, dict[str, str]]:
    """Return, for each feature, the features that must precede it. The values name the feature that requires this."""
    constraints: dict[str, dict[str, str]] = {name: {} for name in features}
    for first, second, source in sorted(_iterate_constraints(features)):
        title = f"{source} ({registry.entry('features', source).origin})"
        if STAGES.index(features[first].stage) > STAGES.index(features[second].stage):
            raise PluginError(
                f"the feature {title} puts {first!r} before {second!r}, which contradicts the order of their stages\n"
                f"    got: {first} in stage {features[first].stage!r}, {second} in stage {features[second].stage!r}\n"
                f"    expected: stages in the order {', '.join(STAGES)}\n"
                "    fix: remove one of them, or change the stage of one of them"
            )
        constraints[second].setdefault(first, title)
    return constraints


def _iterate_constraints(features: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (earlier feature, later feature, feature that defines the constraint)."""
    for name, feature in features.items():
        yield from ((name, other, name) for other in feature.before if other in features)
        yield from ((other, name, name) for other in feature.after if other in features)


def _cycle_error(remaining: list[str], constraints: Mapping[str, Mapping[str, str]]) -> PluginError:
    """Return the error for features whose order has a cycle."""
    path = [remaining[0]]
    while True:  # every remaining feature has a predecessor, so this ends in a cycle
        earlier = min(constraints[path[-1]].keys() & {*remaining})
        if earlier in path:
            cycle = [earlier, *reversed(path[path.index(earlier) :])]
            break
        path.append(earlier)
    lines = [
        f"    {first} before {second}, required by {constraints[second][first]}"
        for first, second in itertools.pairwise(cycle)
    ]
    return PluginError("the order of the features has a cycle\n" + "\n".join(lines) + "\n    fix: remove one of them")


def check_needs(features: Mapping[str, Feature], locations: Mapping[str, str]) -> None:
    """Raise `RequestError` if a required feature is missing or two features exclude each other."""
    for name, feature in sorted(features.items()):
        for other in feature.needs:
            if other not in features:
                raise RequestError(
                    f"the feature {name!r} ({locations[name]}) requires {other!r}\n    fix: add `--with {other}`"
                )
        for other in feature.excludes:
            if other in features:
                raise RequestError(
                    f"the features {name!r} ({locations[name]}) and {other!r} ({locations[other]}) cannot be combined\n"
                    "    fix: remove one of them"
                )
