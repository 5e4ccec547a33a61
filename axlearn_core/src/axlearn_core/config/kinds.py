"""What the fields of a config change: how a program runs, or what it computes.

| kind | changes | example |
|---|---|---|
| `mathematics` | what is computed: the kind of every field without a mark | `model.decoder.num_layers` |
| `execution` | how it runs, and where: numbers differ by rounding alone | `mesh`, `attention.kernel` |
| `microbatches` | how the batch of a step is cut up; mathematics for a model that draws or computes over its batch | \
`learner.accumulate_steps` |
| `duration` | how long it trains | `max_steps` |
| `training` | what training makes of a model, and not what a trained one computes | `linear.init`, `router.z_loss` |
| `precision` | the dtypes that numbers are computed and kept in | `model.dtype` |

The innermost mark on the way to a path holds. A class that `computes_like` another one may take its place as a matter of
execution.
"""

from typing import Any, get_args

import attrs

from axlearn_core.config.flat import Change, field_kind, leaves, qualified_name
from axlearn_core.config.node import Kind, Node, fields_of, marked_kind
from axlearn_core.config.tree import children, get, join, walk

KINDS: tuple[Kind, ...] = get_args(Kind)
"""From what changes the least to what changes the most."""

DECISIVE: tuple[Kind, ...] = ("training", "precision", "mathematics")
"""The kinds of fields that decide the losses of a run."""


def kind_of(tree: object, path: str) -> Kind:
    """What the value at a path changes; raises `ConfigError` where the tree has no such path."""
    kind: Kind = "mathematics"
    value = tree
    for name in path.split(".") if path else []:
        if isinstance(value, Node) and name == "type":
            break
        if name not in children(value):
            get(tree, path)  # raises, with the nearest names
        kind = (field_kind(value, name) if isinstance(value, Node) else None) or kind
        value = children(value)[name]
    return kind


def change_kinds(changes: tuple[Change, ...], old: object, new: object) -> tuple[tuple[Change, Kind], ...]:
    """Each of the differences of two trees with its kind: the strictest of both trees, where both have the path."""
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
    """Path -> value of the fields that decide the losses of a run; without microbatches and duration."""
    return {leaf.path: leaf.value for leaf in leaves(tree, _name) if leaf.kind in DECISIVE}


def microbatches(tree: object) -> dict[str, Any]:
    """Path -> value of each field that cuts up the batch of a step and is not at its default."""
    return {
        join(path, a.name): below
        for path, value in walk(tree)
        if isinstance(value, Node)
        for a, below in zip(attrs.fields(type(value)), fields_of(value).values(), strict=True)
        if marked_kind(a) == "microbatches" and below != a.default
    }


def _root(cls: object) -> Any:
    while like := vars(cls).get("computes_like"):
        cls = like
    return cls


def _name(cls: object) -> str:
    return qualified_name(_root(cls))
