"""Field kinds: each field of a config affects either how a program runs or what it computes.

| kind | affects | example |
|---|---|---|
| `mathematics` | the computed function; the default kind | `model.decoder.num_layers` |
| `execution` | how and on which devices it runs; results differ only by rounding | `mesh`, `attention.kernel` |
| `microbatches` | how a batch is split; mathematics if the model samples or normalizes over its batch | \
`learner.accumulate_steps` |
| `duration` | the length of training | `max_steps` |
| `training` | how a model is trained, but not the function of the trained model | `linear.init`, `router.z_loss` |
| `precision` | the dtypes of computation and storage | `model.dtype` |

The innermost mark along a path applies. Replacing a class with one that `computes_like` it counts as execution.
"""

from typing import Any, get_args

import attrs

from axlearn_core.config.flat import Change, field_kind, leaves, qualified_name
from axlearn_core.config.node import Kind, Node, get_fields, marked_kind
from axlearn_core.config.tree import children, get, join, locate, walk

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds, ordered from the smallest effect on results to the largest."""

DECISIVE: tuple[Kind, ...] = ("training", "precision", "mathematics")
"""Kinds that determine the losses of a run."""


def get_kind(tree: object, path: str) -> Kind:
    """Return the kind of the value at a path. Raise `ConfigError` if the path does not exist."""
    kind: Kind = "mathematics"
    value = tree
    node, _, last = path.rpartition(".")
    path = join(locate(tree, node), last) if last == "type" else locate(tree, path)
    for name in path.split(".") if path else []:
        if isinstance(value, Node) and name == "type":
            break
        if name not in children(value):
            get(tree, path)  # raises, with the nearest names
        kind = (field_kind(value, name) if isinstance(value, Node) else None) or kind
        value = children(value)[name]
    return kind


def change_kinds(changes: tuple[Change, ...], old: object, new: object) -> tuple[tuple[Change, Kind], ...]:
    """Pair each difference between two trees with its kind. If both trees have the path, use the stricter kind."""
    before, after = _kinds(old), _kinds(new)

    def kind(path: str) -> Kind:
        candidates: list[Kind] = [kinds[path] for kinds in (before, after) if path in kinds]
        node = path.rpartition(".")[0]
        if path in before and path in after and path == (f"{node}.type" if node else "type"):
            first, second = get(old, node), get(new, node)
            if isinstance(first, Node) and isinstance(second, Node) and _root(type(first)) is _root(type(second)):
                return "execution"
        return max(candidates, key=KINDS.index)

    return tuple((change, kind(change.path)) for change in changes)


def _kinds(tree: object) -> dict[str, Kind]:
    return {leaf.path: leaf.kind for leaf in leaves(tree)}


def mathematics(tree: object) -> dict[str, Any]:
    """Return the fields that determine the losses of a run, by path. Microbatches and duration are excluded."""
    return {leaf.path: leaf.value for leaf in leaves(tree, _name) if leaf.kind in DECISIVE}


def microbatches(tree: object) -> dict[str, Any]:
    """Return the fields that split the batch of a step and differ from their defaults, by path."""
    return {
        join(path, a.name): below
        for path, value in walk(tree)
        if isinstance(value, Node)
        for a, below in zip(attrs.fields(type(value)), get_fields(value).values(), strict=True)
        if marked_kind(a) == "microbatches" and below != a.default
    }


def _root(cls: object) -> Any:
    while like := vars(cls).get("computes_like"):
        cls = like
    return cls


def _name(cls: object) -> str:
    return qualified_name(_root(cls))
