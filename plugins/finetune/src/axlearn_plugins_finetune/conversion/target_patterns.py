"""Which parts of a config a feature's `target` means."""

from collections.abc import Sequence
from typing import Any

from axlearn_core.config.tree import children, matches
from axlearn_core.errors import ConfigError, Problem, nearest
from axlearn_plugins_transformer.alternate import Alternate


def slot_path(tree: Any, path: str) -> str:
    """The path of the slot that a part stands in, as a parent knows it.

    What takes turns in a slot (`feed_forward.children.1.up` of an `alternate`) is at `feed_forward.up`, and what something
    wraps (`query.base`, `attention.base.query`) is where that stands (`query`, `attention.query`).
    """
    value, parts, slot_parts = tree, path.split("."), []
    while parts:
        if isinstance(value, Alternate):
            value, parts = children(children(value)[parts[0]])[parts[1]], parts[2:]
            continue
        if parts[0] != "base":
            slot_parts.append(parts[0])
        value, parts = children(value)[parts[0]], parts[1:]
    return ".".join(slot_parts)


def matching_paths(tree: Any, target: str | Sequence[str], paths: Sequence[str], *, subject: str) -> set[str]:
    """Those of the linear maps `paths` whose own path or slot fits a pattern of `target`.

    Raises:
        ConfigError: a pattern fits none; it names the nearest.
    """
    patterns = (target,) if isinstance(target, str) else tuple(target)
    slots = {path: slot_path(tree, path) for path in paths}
    matches_of = {p: {path for path in paths if matches(p, path) or matches(p, slots[path])} for p in patterns}
    if problems := [
        _unmatched_target(p, list(dict.fromkeys(slots.values())), subject) for p in patterns if not matches_of[p]
    ]:
        raise ConfigError(problems)
    return set().union(*matches_of.values())


def _unmatched_target(pattern: str, paths: Sequence[str], subject: str) -> Problem:
    plain = pattern.replace("**.", "").replace(".**", "").replace(".*", "").removeprefix("model.")
    tails = {".".join(p.split(".")[-n:]): p for p in paths for n in range(len(p.split(".")), 0, -1)}
    owners = {p.rpartition(".")[0].rpartition(".")[2]: p for p in paths}
    examples = [*paths[:8], *([f"and {len(paths) - 8} more"] if len(paths) > 8 else [])]
    return Problem(
        path=pattern,
        message=f"the target of {subject} fits no linear map",
        expected=f"a pattern that fits one of {', '.join(examples)}" if paths else "a model with linear maps",
        nearest=[(tails | owners)[n] for n in nearest(plain, tails | owners)],
        fix="`axlearn config show --flat` lists every path; `model.**` takes all linear maps",
    )
