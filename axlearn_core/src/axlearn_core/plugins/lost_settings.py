"""Describe the components and settings that a feature, or a setting of a whole component, replaces or resets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config import ABSENT, Node, get_fields
from axlearn_core.config.tree import children, join, matches, slot_path, walk
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.apply_settings import SettingIndex
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.effects import Effect, find_effects, find_lost
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.request import Setting

MOST = 4
"""Number of decisions per feature, and for all settings. The last one gives the number of the others."""


def find_lost_settings(before: Node[Any], after: Node[Any]) -> tuple[Effect, ...]:
    """Return the components and settings of a config that a changed config no longer has, without the defaults of their fields."""
    effects = [e for e in find_effects(after, before) if e.kind != "removal" and not _is_default(e, before)]
    return find_lost(effects, after)


def describe_lost(
    before: Node[Any],
    after: Node[Any],
    feature: str,
    sources: Mapping[str, str],
    name_of: Callable[[Any], str],
) -> list[Decision]:
    """Return a decision for each component or setting that a feature replaced or reset.

    Args:
        before: Config without the feature.
        after: Config with the feature.
        feature: Name of the feature.
        sources: Source of each value by path, such as `feature rope (axlearn-plugins-rope 0.1.0)`.
        name_of: Returns the name of a config class.
    """
    lost = find_lost_settings(before, after)
    cause = f"feature {feature}"
    return _shorten([_describe(e, lost, before, after, sources, name_of, cause) for e in _outermost(lost)])


def describe_lost_to_settings(
    before: Node[Any],
    after: Node[Any],
    settings: Sequence[Setting],
    sources: Mapping[str, str],
    name_of: Callable[[Any], str],
) -> list[Decision]:
    """Return a decision for each value of a feature that a setting of a whole component removed or reset.

    Args:
        before: Config without the settings.
        after: Config with the settings.
        settings: The settings. A setting of the value itself is not described, because it says so.
        sources: Source of each value by path; see `describe_lost`.
        name_of: Returns the name of a config class.
    """
    index = SettingIndex(settings, before)
    lost = tuple(
        e
        for e in find_lost_settings(before, after)
        if _source(e, sources).startswith("feature ") and not index.names(e.place)
    )
    causes = ((effect, index.find(effect.place)) for effect in _outermost(lost))
    return _shorten(
        _describe(effect, lost, before, after, sources, name_of, setting.location)
        for effect, setting in causes
        if setting is not None
    )


def _outermost(lost: Sequence[Effect]) -> list[Effect]:
    """Return the effects that are not part of another one."""
    return [e for e in lost if not any(_is_below(e, other) for other in lost)]


def _source(effect: Effect, sources: Mapping[str, str]) -> str:
    return sources.get(effect.place) or sources.get(join(effect.place, "type")) or ""


def _describe(
    effect: Effect,
    lost: Sequence[Effect],
    before: Node[Any],
    after: Node[Any],
    sources: Mapping[str, str],
    name_of: Callable[[Any], str],
    cause: str,
) -> Decision:
    old, source = _find(before, effect.place), _source(effect, sources)
    settings = [e for e in lost if _is_below(e, effect) and e.kind in ("setting", "items")]
    old_text = _show(old, name_of) + _show_settings(settings, effect.place)
    origin = f", set by {source.partition(' (')[0]}," if source.startswith("feature ") else ""
    outcome = _describe_outcome(effect, old, after, name_of)
    return Decision("replaced", effect.place, f"{old_text}{origin} {outcome}, by {cause}")


def check_not_hidden(
    name: str, feature: Feature, start: Node[Any], tree: Node[Any], earlier: Mapping[str, Feature]
) -> None:
    """Check that a feature that changed nothing is not without effect because of earlier features.

    Args:
        name: Name of the feature.
        feature: The feature.
        start: Config before any feature was applied.
        tree: Config with the earlier features, which the feature did not change.
        earlier: The features that were applied before, by name.

    Raises:
        RequestError: If the feature would change `start`, `tree` does not have that effect, and no earlier feature declares in
            `replaces` that it replaces it.
    """
    try:
        effects = find_effects(start, feature.apply(start))
    except AxlearnError:
        return  # the feature needs what earlier features add
    hidden = [e for e in find_lost(effects, tree) if not any(replaces(other, e.path) for other in earlier.values())]
    if hidden:
        others = ", ".join(repr(other) for other in earlier)
        raise RequestError(
            f"the feature {name!r} changes nothing after {others}\n    expected: {hidden[0]}\n"
            f"    fix: remove one of the features, or select other nodes; see `axlearn features show {name}`"
        )


def replaces(feature: Feature | type[Feature], path: str) -> bool:
    """Return True if a feature declares that it replaces the value at a path, or a part that contains it."""
    parts = path.split(".")
    prefixes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    return any(matches(pattern, prefix) for pattern in feature.replaces for prefix in prefixes)


def filter_decisions(decisions: Iterable[Decision], paths: Iterable[str]) -> list[Decision]:
    """Return the decisions about settings that were replaced at one of the paths, below it, or above it."""
    return [d for d in decisions if d.kind == "replaced" and any(_overlap(d.subject, path) for path in paths)]


def _overlap(subject: str, path: str) -> bool:
    subject = subject.partition(" ")[0]
    return not path or f"{subject}.".startswith(f"{path}.") or f"{path}.".startswith(f"{subject}.")


def _shorten(decisions: Iterable[Decision]) -> list[Decision]:
    decisions = list(dict.fromkeys(decisions))
    if len(decisions) <= MOST:
        return decisions
    last = decisions[MOST - 1]
    return [*decisions[: MOST - 1], attrs.evolve(last, subject=f"{last.subject} and {len(decisions) - MOST} more")]


def _is_default(effect: Effect, tree: Node[Any]) -> bool:
    parent, _, name = effect.place.rpartition(".")
    owner = _find(tree, parent)
    fields = attrs.fields_dict(type(owner)) if isinstance(owner, Node) else {}
    if name not in fields:
        return False
    default, value = fields[name].default, get_fields(owner)[name]
    return type(default) is type(value) and (effect.kind == "component" or bool(default == value))


def _is_below(effect: Effect, other: Effect) -> bool:
    """Return True if the other effect is the component around an effect, or says the same of a whole component."""
    if effect.place == other.place:
        return other.kind == "component" and effect.kind != "component"
    return other.kind == "component" and effect.place.startswith(f"{other.place}.")


def _find(tree: Any, path: str) -> Any:
    for name in path.split(".") if path else []:
        below = children(tree)
        if name not in below:
            return ABSENT
        tree = below[name]
    return tree


def _show(value: Any, name_of: Callable[[Any], str]) -> str:
    if value is ABSENT:
        return "(removed)"
    return name_of(type(value)) if isinstance(value, Node) else repr(value)


def _describe_outcome(effect: Effect, old: Any, after: Node[Any], name_of: Callable[[Any], str]) -> str:
    value = _find(after, effect.place)
    if value is ABSENT:
        name = effect.place.rpartition(".")[2]
        values = (v for p, v in walk(after) if p.rpartition(".")[2] == name and slot_path(after, p) == effect.path)
        return "only in some layers" if any(v == old for v in values) else "-> (removed)"
    return f"-> {_show(value, name_of)}"


def _show_settings(settings: Sequence[Effect], place: str) -> str:
    texts = [f"{e.place.removeprefix(place).lstrip('.') or 'value'}={e.value!r}" for e in settings]
    return f"({', '.join(texts[:MOST])}{', ...' if len(texts) > MOST else ''})" if texts else ""
