"""Match the `target` patterns of a feature against the paths of a config."""

from collections.abc import Sequence
from typing import Any

from axlearn_core.config.tree import matches, slot_path
from axlearn_core.errors import ConfigError, Problem, nearest


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
