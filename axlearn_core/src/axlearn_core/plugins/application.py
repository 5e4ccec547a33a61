"""One feature on one tree: how it is applied, and what it may not do beside others."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config import Change, Node
from axlearn_core.config.kinds import change_kinds
from axlearn_core.config.types import show
from axlearn_core.errors import AxlearnError, PluginError, RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.registry import Entry
from axlearn_core.plugins.request import FeatureUse


def merged(first: FeatureUse, second: FeatureUse) -> FeatureUse:
    """Two uses of one feature as one; raises `RequestError` where they give one option two values."""
    for key in first.options.keys() & second.options.keys():
        a, b = first.options[key], second.options[key]
        if a != b or type(a) is not type(b):
            raise RequestError(
                f"the feature {first.name!r} gets two values for {key!r}: {show(a)} by {first.location}, "
                f"{show(b)} by {second.location}\n    fix: give one of them"
            )
    location = first.location if second.location == first.location else f"{first.location} and {second.location}"
    return attrs.evolve(first, options={**first.options, **second.options}, location=location)


def overridden(base: Sequence[FeatureUse], over: Sequence[FeatureUse]) -> tuple[FeatureUse, ...]:
    """The uses of two files, where the second stands on the first: its options hold, the first's others stay."""
    later = {use.name: use for use in over}
    remaining = [
        attrs.evolve(use, options={**use.options, **later[use.name].options}) if use.name in later else use
        for use in base
    ]
    changed = [use.name for use in base]
    return (*remaining, *(attrs.evolve(use, options={}) if use.name in changed else use for use in over))


def check_needs(features: Mapping[str, Feature], locations: Mapping[str, str]) -> None:
    """Raises `RequestError` where a feature lacks what it needs, or stands beside what it excludes."""
    for name, feature in sorted(features.items()):
        for other in feature.needs:
            if other not in features:
                raise RequestError(
                    f"the feature {name!r} ({locations[name]}) needs {other!r}\n    fix: add `--with {other}`"
                )
        for other in feature.excludes:
            if other in features:
                raise RequestError(
                    f"the features {name!r} ({locations[name]}) and {other!r} ({locations[other]}) cannot be used together\n"
                    "    fix: leave one of them out"
                )


def applied(tree: Node[Any], feature: Feature, entry: Entry) -> Node[Any]:
    """The tree with a feature; raises `RequestError` where it does not fit, `PluginError` where it fails."""
    try:
        result = feature.apply(tree)
    except PluginError:
        raise
    except AxlearnError as error:
        raise RequestError(f"the feature {entry.name!r} ({entry.origin}) does not fit this config:\n{error}") from error
    except Exception as error:  # a feature is a plugin's code and may raise anything; the cause is chained and shown
        raise entry.failed("failed in apply()", error) from error
    if not isinstance(result, Node):
        raise PluginError(f"apply() of the {entry} returned {type(result).__name__}, not a config node")
    return result


def check_execution(changes: tuple[Change, ...], before: Node[Any], after: Node[Any], entry: Entry) -> None:
    """Raises `PluginError` where a feature of the stage `execute` changes more than how a program runs."""
    for change, kind in change_kinds(changes, before, after):
        if kind not in ("execution", "microbatches"):
            raise PluginError(
                f"the feature {entry.name!r} ({entry.origin}) is of the stage 'execute' and changes {change.path}, which is "
                f"{kind}: {change.old!r} -> {change.new!r}\n"
                '    fix: give it another stage, or mark the field with setting(kind="execution") if no result depends on it'
            )


def conflict(later: tuple[Entry, Change], earlier: tuple[Entry, Change], stage: str) -> RequestError:
    """The error for two features of one stage, without a stated order, that change one path."""
    (a, first), (b, second) = earlier, later
    return RequestError(
        f"two features of the stage {stage!r} change {second.path}:\n"
        f"    {a.name} ({a.origin}): {first.old!r} -> {first.new!r}\n"
        f"    {b.name} ({b.origin}): {second.old!r} -> {second.new!r}\n"
        "    fix: leave one of them out"
    )
