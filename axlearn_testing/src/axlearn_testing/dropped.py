"""Find features that drop the effect of another feature. Only configs are compared; nothing is built."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config import Node
from axlearn_core.errors import AxlearnError, PluginError
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.effects import Effect, find_effects, find_lost
from axlearn_core.plugins.lost_settings import replaces
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import Resolved, resolve


@attrs.frozen
class Dropped:
    """A feature's effect that is missing from the config, although no other feature declares that it replaces the effect.

    Attributes:
        feature: Name of the feature.
        effect: The effect.
        features: All features, in the order of their application.
        declared: Name of the feature that declares that it replaces the path but reports no decision, or None.
    """

    feature: str
    effect: Effect
    features: tuple[str, ...]
    declared: str | None = None

    def __str__(self) -> str:
        why = "no feature declares it in `replaces`"
        if self.declared:
            why = f"{self.declared} declares it in `replaces`, but no decision says so"
        return f"{', then '.join(self.features)}: the effect of {self.feature} is lost, and {why}\n    {self.effect}"


def add_needs(*texts: str, examples: bool = True) -> tuple[str, ...]:
    """Return `NAME:OPTIONS` of features and of the features that they need.

    Args:
        texts: `NAME:OPTIONS` of each feature.
        examples: Whether to add the features that only an example requires (`Feature.example_needs`).
    """
    names = {text.partition(":")[0] for text in texts}
    missing = [name for name in _needed_names(texts, examples) if name not in names]
    return add_needs(*map(feature_text, missing), *texts, examples=examples) if missing else texts


def add_fewest_needs(tree: Node[Any], *texts: str) -> tuple[str, ...]:
    """Return `NAME:OPTIONS` of features and of the features that they need on a config.

    Features that only an example requires are left out if the config, or one of `texts`, makes them unnecessary: `sampling-mask`
    needs a method with rollouts, so with `dapo` it does not need `grpo`.
    """
    needed, required = add_needs(*texts), add_needs(*texts, examples=False)
    optional = [text for text in needed if text not in required]
    for count in range(len(optional)):
        for chosen in itertools.combinations(optional, count):
            fewer = add_needs(*chosen, *texts, examples=False)
            if not isinstance(_resolve_or_refusal(tree, fewer), AxlearnError):
                return fewer
    return needed


def _needed_names(texts: Iterable[str], examples: bool = True) -> list[str]:
    names = sorted({text.partition(":")[0] for text in texts})
    needs = needed_features if examples else lambda name: registry().feature(name).needs
    return list(dict.fromkeys(other for name in names for other in needs(name)))


def needed_features(name: str) -> tuple[str, ...]:
    """Return the names of the features that the example of a feature requires."""
    feature = registry().feature(name)
    return (*feature.needs, *feature.example_needs)


def feature_text(name: str) -> str:
    """Return `NAME:EXAMPLE` for a feature, or its name if it has no example."""
    example = registry().feature(name).example
    return f"{name}:{example}" if example else name


@functools.lru_cache(maxsize=4096)
def find_effects_alone(tree: Node[Any], text: str) -> tuple[Effect, ...]:
    """Return the effect of a feature on a config that has the features that it needs, and no others.

    Raises:
        RequestError: The config cannot have the feature.
    """
    texts = add_fewest_needs(tree, text)
    before = resolve(tree, with_=texts[:-1]).config if len(texts) > 1 else tree
    return find_effects(before, resolve(before, with_=texts).config)


def find_dropped(tree: Node[Any], *texts: str) -> tuple[Dropped, ...]:
    """Return the effects that features drop if a request has all of them.

    Args:
        tree: Config without the features.
        texts: `NAME:OPTIONS` of each feature. Features that they need are added.

    Raises:
        RequestError: The config cannot have one of the features, or cannot have all of them.
    """
    texts = add_fewest_needs(tree, *texts)
    alone = {text.partition(":")[0]: find_effects_alone(tree, text) for text in texts}
    resolved = resolve(tree, with_=texts)
    order = tuple(name for name, _ in resolved.features)

    def without(name: str) -> Node[Any] | None:
        remaining = tuple(text for text in texts if text.partition(":")[0] != name)
        resolved = None if name in _needed_names(remaining) else _resolve_or_refusal(tree, remaining)
        return resolved.config if isinstance(resolved, Resolved) else None

    return _list_dropped(alone, order, resolved.config, resolved.decisions, without)


def find_dropped_in_turn(tree: Node[Any], first: str, second: str) -> tuple[Dropped, ...]:
    """Return the effects that are dropped if one request adds a feature to a config, and a later request adds the other feature.

    This happens if you add a feature to the config of a run. The stages of the features then do not determine their order.

    Args:
        tree: Config without the features.
        first: `NAME:OPTIONS` of the feature that the config has.
        second: `NAME:OPTIONS` of the feature that is added.

    Raises:
        RequestError: The config cannot have one of the features, or cannot have both.
    """
    names = (first.partition(":")[0], second.partition(":")[0])
    alone = {name: find_effects_alone(tree, text) for name, text in zip(names, (first, second), strict=True)}
    with_first = _resolve_cached(tree, add_fewest_needs(tree, first)).config
    texts = add_fewest_needs(with_first, second)
    resolved = resolve(with_first, with_=texts)
    order = (names[0], *(name for text in texts if (name := text.partition(":")[0]) != names[0]))

    def without(name: str) -> Node[Any] | None:
        return with_first if name == names[1] else None

    return _list_dropped(alone, order, resolved.config, resolved.decisions, without)


def find_dropped_or_refusal(tree: Node[Any], first: str, second: str) -> tuple[Dropped, ...] | AxlearnError:
    """Return the dropped effects of two features that are added in turn (see `find_dropped_in_turn`), or the error if refused."""
    try:
        return find_dropped_in_turn(tree, first, second)
    except PluginError:
        raise  # a feature that fails, and does not refuse
    except AxlearnError as error:
        return error


@functools.lru_cache(maxsize=256)
def _resolve_cached(tree: Node[Any], texts: Sequence[str]) -> Resolved:
    return resolve(tree, with_=texts)


@functools.lru_cache(maxsize=256)
def _resolve_or_refusal(tree: Node[Any], texts: Sequence[str]) -> Resolved | AxlearnError:
    try:
        return resolve(tree, with_=texts)
    except PluginError:
        raise  # a feature that fails, and does not refuse
    except AxlearnError as error:
        return error


def _list_dropped(
    alone: Mapping[str, Iterable[Effect]],
    order: tuple[str, ...],
    tree: Node[Any],
    decisions: Sequence[Decision],
    without: Callable[[str], Node[Any] | None],
) -> tuple[Dropped, ...]:
    dropped = []
    for name, effects in alone.items():
        others = [e for other, effects in alone.items() if other != name for e in effects]
        lost = find_lost(effects, tree, others)
        for effect in lost:
            later = order[order.index(name) + 1 :]
            declared = [other for other in later if _declares(other, effect, name)]
            if any(_has_decision(other, decisions) for other in declared):
                continue
            if not declared and _is_elsewhere(effect, others, functools.partial(_find_changes, without, name, tree)):
                continue
            dropped.append(Dropped(name, effect, order, declared[0] if declared else None))
    return tuple(dropped)


def _find_changes(without: Callable[[str], Node[Any] | None], name: str, tree: Node[Any]) -> tuple[Effect, ...]:
    before = without(name)
    return () if before is None else find_effects(before, tree)


def _declares(name: str, effect: Effect, other: str) -> bool:
    """Return True if a feature declares that it replaces what another feature put at a path."""
    cls, other_cls = registry().feature(name), registry().feature(other)
    return replaces(cls, effect.path) or other in cls.excludes or name in other_cls.excludes


def _has_decision(name: str, decisions: Sequence[Decision]) -> bool:
    return any(d.kind == "replaced" and d.reason.endswith(f"by feature {name}") for d in decisions)


def _is_elsewhere(effect: Effect, others: Sequence[Effect], find_changes: Callable[[], Sequence[Effect]]) -> bool:
    """Return True if another feature replaced the component that an effect belongs to, and the feature changes the new one.

    For example, `paged-cache` changes `kv_cache` of attention, and `latent_cache` of the latent attention that replaced it.
    `find_changes` returns the effect of the feature on a config that has the other features.
    """
    replaced = [e.path for e in others if e.kind == "component" and effect.path.startswith(f"{e.path}.")]
    return any(own.path.startswith(f"{path}.") for path in replaced for own in (find_changes() if replaced else ()))
