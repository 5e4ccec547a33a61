"""Find the effect of a feature in a config, also after other features have moved it."""

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from axlearn_core.config import Node, get_fields
from axlearn_core.config.node import interface_fields, label_fields
from axlearn_core.config.tree import children, join, slot_path
from axlearn_core.config.wrappers import slot_nodes, wrapped_nodes

Branch = tuple[str, ...]
"""The alternatives on the way to a value: `SLOT:children.1` for each `alternate`, outermost first."""


@attrs.frozen
class Effect:
    """One thing that a feature puts into a config.

    Attributes:
        kind: What the feature does at the path:
            `component`: puts a node of the class `value` there.
            `alternatives`: puts nodes of certain classes into some of the layers. `value` has (position, class) of each.
            `setting`: sets the value to `value`.
            `items`: adds the items in `value` to a tuple.
            `removal`: removes a mapping key, or the items in `value` from a tuple.
        path: Path without wrappers and alternatives, which other features may add or remove.
        value: See `kind`.
        owner: Class of the node that has the setting, or None.
        branch: The alternatives on the way to it, which belong to different layers.
        place: Path in the config that has only this feature.
    """

    kind: Literal["component", "alternatives", "setting", "items", "removal"]
    path: str
    value: Any
    owner: type | None = attrs.field(default=None, eq=False)
    branch: Branch = ()
    place: str = attrs.field(default="", eq=False)

    def __str__(self) -> str:
        if self.kind == "alternatives":
            value: Any = ", ".join(f"{position}: {_name(cls)}" for position, cls in self.value)
        else:
            value = _name(self.value) if self.kind == "component" else repr(self.value)
        return f"{self.path}: {self.kind} {value}"


def _name(cls: type) -> str:
    return cls.__qualname__


def find_effects(before: Node[Any], after: Node[Any]) -> tuple[Effect, ...]:
    """Return the components and settings that a feature put into a config.

    Values that it carried over from a node that it wrapped or replaced are not among its effects, and neither are the defaults of
    the nodes that it added.
    """
    return tuple(dict.fromkeys(_add_path(effect, after) for effect in _compare(before, after, "", None)))


def _add_path(effect: Effect, after: Node[Any]) -> Effect:
    parent, _, name = effect.place.rpartition(".")
    if effect.kind == "removal" and effect.value is None:
        return attrs.evolve(effect, path=join(slot_path(after, parent), name), branch=_branch(after, parent))
    return attrs.evolve(effect, path=slot_path(after, effect.place), branch=_branch(after, effect.place))


def _branch(tree: Node[Any], path: str) -> Branch:
    """Return the alternatives on the way to a path."""
    value: Any = tree
    branch, parts, slot = [], path.split(".") if path else [], ""
    while parts:
        nodes = wrapped_nodes(value)
        pair = ".".join(parts[:2])
        if pair in nodes:
            branch.append(f"{slot}:{pair}")
            value, parts = nodes[pair], parts[2:]
            continue
        slot = slot if parts[0] in nodes else join(slot, parts[0])
        value, parts = children(value)[parts[0]], parts[1:]
    return tuple(branch)


def _compare(old: Any, new: Any, place: str, owner: type | None) -> Iterator[Effect]:
    if old is new or (type(old) is type(new) and old == new):
        return
    if isinstance(new, Node):
        yield from _compare_node(old, new, place)
    elif isinstance(old, tuple) and isinstance(new, tuple):
        yield from _compare_tuple(old, new, place, owner)
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for name, value in children(new).items():
            yield from _compare(children(old).get(name), value, join(place, name), owner)
        gone = [name for name in children(old) if name not in children(new)]
        yield from (Effect("removal", "", None, owner, place=join(place, name)) for name in gone)
    else:
        yield Effect("setting", "", new, owner, place=place)


def _compare_tuple(old: tuple[Any, ...], new: tuple[Any, ...], place: str, owner: type | None) -> Iterator[Effect]:
    if len(old) == len(new) and all(type(a) is type(b) and isinstance(a, Node) for a, b in zip(old, new, strict=True)):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _compare(a, b, join(place, str(i)), owner)
        return
    if added := tuple(item for item in new if item not in old):
        yield Effect("items", "", added, owner, place=place)
    if removed := tuple(item for item in old if item not in new):
        yield Effect("removal", "", removed, owner, place=place)


def _compare_node(old: Any, new: Node[Any], place: str, *, alternative: bool = False) -> Iterator[Effect]:
    cls = type(new)
    if type(old) is cls:
        for name, value in _own_fields(new).items():
            before, full = get_fields(old)[name], join(place, name)
            if name in cls.wraps and isinstance(value, tuple) and len(before) == len(value):
                for i, (a, b) in enumerate(zip(before, value, strict=True)):  # the layers keep their positions
                    yield from _compare(a, b, join(full, str(i)), cls)
            else:
                yield from _compare(before, value, full, cls)
        return
    below = wrapped_nodes(new)
    continued = {name for name, node in below.items() if any(_continues(n, old) for _, n in slot_nodes(node))}
    varies = bool(below) and not _is_wrapper(new)
    if varies and not isinstance(old, Node):
        yield Effect("setting", "", new, None, place=place)  # a pattern of values, such as windows
        return
    if not alternative:  # the effect `alternatives` has its position
        yield Effect("component", "", cls, None, place=place)
    if varies:
        yield Effect(
            "alternatives", "", tuple((n, type(v)) for n, v in below.items() if n not in continued), None, place=place
        )
    for name, value in _own_fields(new).items():
        default = attrs.fields_dict(cls)[name].default
        full = join(place, name)
        if name in type(new).wraps:
            continue
        if isinstance(old, Node) and not continued and name in get_fields(old) and get_fields(old)[name] == value:
            continue  # carried over
        yield from _compare(default, value, full, cls)
    for name, node in below.items():
        if name not in continued or type(old) is not type(node) or old != node:
            full = join(place, name)
            yield from _compare_node(old if name in continued else None, node, full, alternative=varies or alternative)


def _is_wrapper(node: Node[Any]) -> bool:
    return any("." not in name for name in wrapped_nodes(node))


def _continues(node: Node[Any], old: Any) -> bool:
    return type(node) is type(old)


def _own_fields(node: Node[Any]) -> dict[str, Any]:
    hidden = interface_fields(type(node)) | label_fields(type(node))
    return {name: value for name, value in get_fields(node).items() if name not in hidden}


@attrs.frozen
class _Entry:
    """A value in a slot.

    Attributes:
        value: The value.
        owner: Class of the node that has it.
        branch: The alternatives on the way to it.
        new: True if it is in a component that another feature added.
    """

    value: Any
    owner: type | None
    branch: Branch
    new: bool


def find_lost(effects: Iterable[Effect], tree: Node[Any], other: Iterable[Effect] = ()) -> tuple[Effect, ...]:
    """Return the effects that are not in a config.

    Args:
        effects: Effects of a feature.
        tree: Config that should have them.
        other: Effects of the other features in the config. Components that they add need not have the effects, as long as other
            components have them.
    """
    missing = [effect for effect in effects if not _is_in_place(effect, tree)]
    if not missing:
        return ()
    added = {(e.path, e.value) for e in other if e.kind == "component"}
    added |= {(e.path, cls) for e in other if e.kind == "alternatives" for _, cls in e.value}
    index = _Index(added)
    index.add(tree, "", None, (), new=False)
    return tuple(effect for effect in missing if not _is_in(effect, index.entries.get(effect.path, [])))


def _is_in_place(effect: Effect, tree: Node[Any]) -> bool:
    """Return True if a setting is at its path in the config where no other feature moved it."""
    if effect.kind not in ("setting", "items"):
        return False
    value: Any = tree
    for name in effect.place.split("."):
        below = children(value)
        if name not in below or wrapped_nodes(value):
            return False
        value = below[name]
    return _holds(effect, value)


def _holds(effect: Effect, value: Any) -> bool:
    if effect.kind == "component":
        return isinstance(value, effect.value)
    if effect.kind == "alternatives":
        return _has_alternatives(value, effect.value)
    if effect.kind == "setting":
        return type(value) is type(effect.value) and bool(value == effect.value)
    if effect.kind == "items":
        return isinstance(value, tuple) and all(any(_extends(v, item) for v in value) for item in effect.value)
    return isinstance(value, tuple) and not any(v in effect.value for v in value)


def _extends(value: Any, item: Any) -> bool:
    """Return True if an item of a tuple is another one, or has all its settings."""
    if not isinstance(item, Node) or type(value) is not type(item):
        return type(value) is type(item) and bool(value == item)
    set_fields = (a.name for a in attrs.fields(type(item)) if get_fields(item)[a.name] != a.default)
    return all(get_fields(value)[name] == get_fields(item)[name] for name in set_fields)


def _has_alternatives(value: Any, expected: tuple[tuple[str, type], ...]) -> bool:
    below = wrapped_nodes(value)
    return all(
        position in below and any(isinstance(n, cls) for _, n in slot_nodes(below[position]))
        for position, cls in expected
    )


def _is_in(effect: Effect, entries: list[_Entry]) -> bool:
    if effect.kind == "removal" and effect.value is None:
        return not entries
    if effect.kind == "alternatives":
        return any(_holds(effect, e.value) for e in entries)
    if effect.owner:
        entries = [e for e in entries if e.owner and _is_related(e.owner, effect.owner)] or entries
    same_layers = [e for e in entries if {*effect.branch} <= {*e.branch}]
    entries = same_layers or entries
    branches = {e.branch for e in entries if not e.new} if same_layers else set[Branch]()
    if not branches:
        return any(_holds(effect, e.value) for e in entries)
    innermost = [b for b in branches if not any(b == other[: len(b)] for other in branches if other != b)]
    return all(any(_holds(effect, e.value) for e in entries if e.branch == b[: len(e.branch)]) for b in innermost)


def _is_related(one: type, other: type) -> bool:
    return issubclass(one, other) or issubclass(other, one)


class _Index:
    """The values of a config by their path without wrappers and alternatives.

    Args:
        added: Components of other features: (path, class).
    """

    def __init__(self, added: set[tuple[str, Any]]):
        self.added = added
        self.entries: dict[str, list[_Entry]] = collections.defaultdict(list)

    def add(self, value: Any, slot: str, owner: type | None, branch: Branch, *, new: bool) -> None:
        """Add a value and everything below it."""
        if isinstance(value, Node):
            self._add_node(value, slot, owner, branch, new)
            return
        self.entries[slot].append(_Entry(value, owner, branch, new))
        for name, child in children(value).items():
            self.add(child, join(slot, name), owner, branch, new=new)

    def _add_node(self, value: Node[Any], slot: str, owner: type | None, branch: Branch, new: bool) -> None:
        below = wrapped_nodes(value)
        new = new or (not below and (slot, type(value)) in self.added)
        self.entries[slot].append(_Entry(value, owner, branch, new))
        for name, child in _own_fields(value).items():
            if not below or name not in type(value).wraps:
                self.add(child, join(slot, name), type(value), branch, new=new)
        for name, node in below.items():
            self._add_node(node, slot, owner, (*branch, f"{slot}:{name}") if "." in name else branch, new)
