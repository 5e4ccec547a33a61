"""Find the smallest request for which a property still fails."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from axlearn_core.config import Node, get
from axlearn_core.config.codec import encode
from axlearn_core.config.flat import leaves
from axlearn_core.config.tree import children, walk
from axlearn_core.errors import AxlearnError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, Setting, format_value
from axlearn_core.plugins.resolve import Resolved, resolve

MAX_LAYERS = 6
"""The layer counts to try start at one and stay below this number."""

Meshes = tuple[Mapping[str, int], ...]
StillFails = Callable[[Resolved, Meshes, bool], Any]
"""Takes a resolved request, its meshes, and whether to name the layer that differs. Returns the failed check or None."""


@attrs.frozen(kw_only=True)
class Minimal:
    """The smallest request that still fails.

    Attributes:
        words: Arguments of the request, as for `axlearn prove`.
        meshes: Shapes of the meshes on which the property fails. Empty stands for the meshes of the proof.
        features: Names of the features that remain.
        removed: Features, settings, layers and meshes that do not matter, in the syntax of the command line.
        check: The failed check of the smallest request: a `checks.Check`.
        complete: Whether every part was tried before the time limit.
    """

    words: tuple[str, ...]
    meshes: Meshes = ()
    features: tuple[str, ...] = ()
    removed: tuple[str, ...]
    check: Any
    complete: bool


@attrs.frozen
class _Candidate:
    """A request that may still fail.

    Attributes:
        request: The request.
        meshes: Shapes of the meshes. Empty stands for the meshes of the proof.
    """

    request: Request
    meshes: Meshes


def minimize(
    request: Request, resolved: Resolved, still_fails: StillFails, *, deadline: float, meshes: Meshes = ()
) -> Minimal | None:
    """Remove features, settings, layers, losses and mesh axes, one by one, as long as the property fails without them.

    Args:
        request: Request that fails.
        resolved: The resolved request.
        still_fails: Checks a resolved request on meshes.
        deadline: Time at which to stop, on the clock of `time.monotonic`.
        meshes: Shapes of the meshes of the proof if the property depends on them.

    Returns:
        The smallest request, or None if the property holds when the unchanged request is checked again.
    """
    check = still_fails(resolved, (), False)
    if check is None:
        return None
    smallest, removed = _Candidate(request, ()), list[str]()
    complete, changed = True, True
    while changed and complete:
        changed, index = False, 0
        while parts := list(_smaller(smallest, resolved, meshes))[index : index + 1]:
            part, candidate = parts[0]
            if time.monotonic() > deadline:
                complete = False
                break
            result = _check(candidate, still_fails)
            if result is None:
                index += 1  # the part matters
                continue
            (resolved, check), smallest, changed = result, candidate, True
            removed.append(part)
    return Minimal(
        words=tuple(smallest.request.words),
        meshes=smallest.meshes,
        features=tuple(name for name, _ in resolved.features),
        removed=tuple(removed),
        check=still_fails(resolved, smallest.meshes, True) or check,
        complete=complete,
    )


def _check(candidate: _Candidate, still_fails: StillFails) -> tuple[Resolved, Any] | None:
    try:
        resolved = resolve(candidate.request)
        check = still_fails(resolved, candidate.meshes, False)
    except AxlearnError:
        return None  # the rest needs the part, or cannot be shrunk without it
    return None if check is None else (resolved, check)


def _smaller(candidate: _Candidate, resolved: Resolved, meshes: Meshes) -> Iterator[tuple[str, _Candidate]]:
    """Yield each part that can be removed, and the candidate without it."""
    for part, request in _smaller_requests(candidate.request, resolved):
        yield part, attrs.evolve(candidate, request=request)
    for part, setting in _smaller_values(resolved.config):
        settings = tuple(s for s in candidate.request.settings if s.path != setting.path)
        yield part, attrs.evolve(candidate, request=attrs.evolve(candidate.request, settings=(*settings, setting)))
    for part, shapes in _smaller_meshes(candidate.meshes or meshes):
        yield part, attrs.evolve(candidate, meshes=shapes)


def _smaller_requests(request: Request, resolved: Resolved) -> Iterator[tuple[str, Request]]:
    """Yield each part that can be removed (a target, a feature, or a setting), and the request without it.

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
        if setting.location != __name__:
            rest = (*request.settings[:index], *request.settings[index + 1 :])
            yield f"--set {setting.path}={setting.value}", attrs.evolve(request, settings=rest)


def _smaller_values(config: Any) -> Iterator[tuple[str, Setting]]:
    """Yield parts of the config (evaluators, losses, kinds of layers, and layers), and the settings that remove them."""
    if config.evaluators:
        yield f"evaluators {', '.join(config.evaluators)}", _setting("evaluators", {})
    for leaf in leaves(config):
        is_number = isinstance(leaf.value, float) and leaf.value and leaf.kind == "training"
        if is_number and leaf.path.startswith(("model.", "objective.")) and "init" not in leaf.path.split("."):
            yield f"{leaf.path}={format_value(leaf.value)}", _setting(leaf.path, 0.0)
    for path, node in walk(config.model):
        kinds = _kinds(node)
        for kind in kinds:
            others = f"{len(kinds) - 1} of {len(kinds)} kinds of model.{path}"
            yield others, _setting(f"model.{path}", encode(kind, registry()))
    for path, value in walk(config.model):
        if path.rpartition(".")[2] == "num_layers" and isinstance(value, int):
            for count in range(1, min(value, MAX_LAYERS)):
                yield f"layers of model.{path} after {count}", _setting(f"model.{path}", count)
    axes = get(config, "mesh.shape")
    for axis in (a for a, size in axes.items() if size != 1):
        rest = {a: size for a, size in axes.items() if a != axis}
        yield f"mesh axis {axis}", _setting("mesh.shape", rest)


def _kinds(node: Any) -> list[Any]:
    """Return the kinds of layers that a node alternates between. The result is empty if it does not alternate."""
    fields = children(node) if isinstance(node, Node) else {}
    if not isinstance(fields.get("children"), tuple) or not isinstance(fields.get("first"), tuple):
        return []
    kinds: list[Any] = []
    for kind in (*fields["first"], *fields["children"]):
        if kind not in kinds:
            kinds.append(kind)
    return kinds


def _setting(path: str, value: Any) -> Setting:
    return Setting(path=path, value=value, location=__name__)


def _smaller_meshes(shapes: Meshes) -> Iterator[tuple[str, Meshes]]:
    """Yield one mesh of several, or a mesh without one of its axes."""
    if len(shapes) > 1:
        for shape in shapes:
            yield "other meshes", (shape,)
    for shape in shapes[:1] if len(shapes) == 1 else ():
        for axis in shape if len(shape) > 1 else ():
            yield f"--mesh {axis}={shape[axis]}", ({a: size for a, size in shape.items() if a != axis},)


def command(minimal: Minimal) -> str:
    """Return the command that reproduces the failure."""
    words = [*minimal.words, "--only", minimal.check.name]
    words += ["--mesh", ",".join(f"{a}={size}" for a, size in minimal.meshes[0].items())] if minimal.meshes else []
    words += ["--seed", str(minimal.check.seed)] if minimal.check.seed else []
    return f"axlearn prove {shlex.join(words)}"
