"""Match the `target` patterns of a feature against the paths of a config."""

from collections.abc import Sequence
from typing import Any

from axlearn_core.config.tree import children, matches
from axlearn_core.errors import ConfigError, Problem, nearest
from axlearn_plugins_transformer.alternate import Alternate


def slot_path(tree: Any, path: str) -> str:
    """Return the path of a node's slot, without alternatives and wrappers.

    A node in one alternative of an `alternate` (`feed_forward.children.1.up`) has the slot `feed_forward.up`. A wrapped node
    (`query.base`, `attention.base.query`) has the slot of its wrapper (`query`, `attention.query`).
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
    """Return the linear maps among `paths` whose path or slot matches a pattern of `target`.

    Raises:
        ConfigError: A pattern matches no linear map. The error names the nearest paths.
    """
    patterns = (target,) if isinstance(target, str) else tuple(target)
    slots = {path: slot_path(tree, path) for path in paths}
    matched = {p: {path for path in paths if matches(p, path) or matches(p, slots[path])} for p in patterns}
    if problems := [
        _unmatched_target(p, list(dict.fromkeys(slots.values())), subject) for p in patterns if not matched[p]
    ]:
        raise ConfigError(problems)
    return set().union(*matched.values())


def _unmatched_target(pattern: str, paths: Sequence[str], subject: str) -> Problem:
    plain = pattern.replace("**.", "").replace(".**", "").replace(".*", "").removeprefix("model.")
    tails = {".".join(p.split(".")[-n:]): p for p in paths for n in range(len(p.split(".")), 0, -1)}
    owners = {p.rpartition(".")[0].rpartition(".")[2]: p for p in paths}
    examples = [*paths[:8], *([f"and {len(paths) - 8} more"] if len(paths) > 8 else [])]
    return Problem(
        path=pattern,
        message=f"the target of {subject} does not match any linear map",
        expected=f"a pattern that matches one of {', '.join(examples)}" if paths else "a model with linear maps",
        nearest=[(tails | owners)[n] for n in nearest(plain, tails | owners)],
        fix="`axlearn config show --flat` lists all paths; `model.**` matches all linear maps",
    )
