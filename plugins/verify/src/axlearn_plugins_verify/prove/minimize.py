"""Find the smallest request for which a property still fails."""

import shlex
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from axlearn_core.errors import AxlearnError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve


@attrs.frozen(kw_only=True)
class Minimal:
    """The smallest request that still fails.

    Attributes:
        words: Its arguments, as for `axlearn prove`.
        removed: Features and settings that do not matter, in the syntax of the command line.
        check: The failed check of the smallest request: a `proof.Check`.
        complete: Whether every part was tried before the time limit.
    """

    words: tuple[str, ...]
    removed: tuple[str, ...]
    check: Any
    complete: bool


def minimize(
    request: Request, resolved: Resolved, still_fails: Callable[[Any], Any], *, deadline: float
) -> Minimal | None:
    """Remove features and settings, one by one, as long as the property fails without them.

    Args:
        request: Request that fails.
        resolved: The resolved request.
        still_fails: Takes a config, and returns its failed check, or None if the property holds.
        deadline: Time of `time.monotonic` to stop at.

    Returns:
        The smallest request, or None if the property holds when the unchanged request is checked again.
    """
    check = still_fails(resolved.config)
    if check is None:
        return None
    removed: list[str] = []
    complete, changed = True, True
    while changed and complete:
        changed = False
        for part, smaller in _smaller_requests(request, resolved):
            if time.monotonic() > deadline:
                complete = False
                break
            smaller_check = _check(smaller, still_fails)
            if smaller_check is not None:
                request, check, changed = smaller, smaller_check, True
                removed.append(part)
                break
    return Minimal(words=tuple(request.words), removed=tuple(removed), check=check, complete=complete)


def _check(request: Request, still_fails: Callable[[Any], Any]) -> Any:
    try:
        return still_fails(resolve(request).config)
    except AxlearnError:
        return None  # the rest needs the part, or cannot be shrunk without it


def _smaller_requests(request: Request, resolved: Resolved) -> Iterator[tuple[str, Request]]:
    """Yield the requests with one part less, and the part: a target, a feature, or a setting.

    Features of a file or of a mesh rule are removed with `--without`.
    """
    if request.target is not None:
        yield f"--target {request.target}", attrs.evolve(request, target=None)
    for index, use in enumerate(request.features):
        rest = (*request.features[:index], *request.features[index + 1 :])
        yield f"--with {use.text}", attrs.evolve(request, features=rest)
    requested = {use.name for use in request.features}
    for name, _ in resolved.features:
        if name not in requested and name not in request.without:
            yield name, attrs.evolve(request, without=(*request.without, name))
    for index, setting in enumerate(request.settings):
        rest = (*request.settings[:index], *request.settings[index + 1 :])
        yield f"--set {setting.path}={setting.value}", attrs.evolve(request, settings=rest)


def command(minimal: Minimal) -> str:
    """Return the command that repeats the failure."""
    return f"axlearn prove {shlex.join([*minimal.words, '--only', minimal.check.name])}"
