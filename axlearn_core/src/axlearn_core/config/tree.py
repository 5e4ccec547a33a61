"""Query and edit config trees. Every edit returns a new tree that shares unchanged objects with the old one.

A path joins field names of nodes, keys of mappings, and indices of tuples with dots (`trackers.0.every_steps`). In a
pattern, `*` matches one part and `**` matches zero or more parts. The wrappers of a node may be left out of a path or a pattern:
`attention.num_heads` is `attention.inner.num_heads` if the wrapper itself has no `num_heads`.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from immutabledict import immutabledict

from axlearn_core.config.node import REQUIRED, Node, field_names, get_field, get_fields, interface_fields, is_interface
from axlearn_core.config.offers import check_offers
from axlearn_core.config.roles import Role
from axlearn_core.config.run_scheme import check_assets
from axlearn_core.config.slots import check_slots, list_slots
from axlearn_core.config.types import show
from axlearn_core.config.wrappers import slot_nodes, wrapped_node, wrapped_nodes
from axlearn_core.errors import SHOWN_PROBLEMS, ConfigError, Problem, nearest


def children(value: object) -> dict[str, Any]:
    """Return the direct children by name: the fields of a node or the items of a tuple or mapping. Leaves have none."""
    if isinstance(value, Node):
        return get_fields(value)
    if isinstance(value, tuple):
        return {str(i): v for i, v in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(k): v for k, v in value.items()}
    return {}


_MISSING: Any = object()


def _child(value: object, name: str) -> Any:
    """Return one of the `children`, or `_MISSING`."""
    if isinstance(value, Node):
        return get_field(value, name) if name in field_names(type(value)) else _MISSING
    return children(value).get(name, _MISSING)


def with_children(value: Any, new: Mapping[str, Any]) -> Any:
    """Replace some children of `value`. Return the same object if nothing changes."""
    old = children(value)
    changed = {k: v for k, v in new.items() if k not in old or v is not old[k]}
    if not changed:
        return value
    if isinstance(value, Node):
        return attrs.evolve(value, **changed)
    if isinstance(value, tuple):
        return tuple((old | changed).values())
    return immutabledict({**value, **changed})


def join(path: str, name: str) -> str:
    """Return `path.name`, or `name` if `path` is empty."""
    return f"{path}.{name}" if path else name


def walk(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every node and leaf, parents first."""
    yield path, tree
    for name, child in children(tree).items():
        yield from walk(child, join(path, name))


def map(tree: object, function: Callable[[Any], Any]) -> Any:  # the usual name for this operation
    """Apply `function` to every node, children first. Do not visit the nodes that it returns."""
    tree = with_children(tree, {k: map(v, function) for k, v in children(tree).items()})
    return function(tree) if isinstance(tree, Node) else tree


def matches(pattern: str, path: str) -> bool:
    """Return True if a dotted path matches a pattern. A part may contain `*`, as in `layer*`."""
    parts = pattern.split(".") if pattern else []
    # Collapse consecutive `**`: they match the same paths, and matching would take exponential time.
    parts = [p for i, p in enumerate(parts) if p != "**" or parts[i - 1 : i] != ["**"]]
    return _fits(parts, path.split(".") if path else [])


def _fits(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(pattern[1:], parts[i:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(pattern[1:], parts[1:])


def find(tree: object, query: str | type) -> dict[str, Any]:
    """Return the values that match a path pattern, or all nodes of a class, config class, or role, by path."""
    if isinstance(query, str):
        return {
            p: v
            for p, short, v in _walk_short(tree)
            if matches(query, p) or (short is not None and matches(query, short))
        }
    kind = config_class(query)
    return {p: v for p, v in walk(tree) if isinstance(v, kind)}


def _walk_short(
    tree: object, path: str = "", short: str | None = None, hidden: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str | None, Any]]:
    """Yield each path, the path without wrappers if it differs and is unique, and the value.

    Args:
        tree: A config.
        path: Its path.
        short: Its path without wrappers, if it is below one.
        hidden: Names that a wrapper of the tree already has.
    """
    yield path, None if hidden else short, tree
    below, wrapper = children(tree), wrapped_node(tree)
    for name, child in below.items():
        full = join(path, name)
        if wrapper and name == wrapper[0]:
            yield from _walk_short(child, full, path if short is None else short, hidden | below.keys())
        else:
            yield from _walk_short(child, full, None if short is None or name in hidden else join(short, name))


def config_class(target: object) -> type:
    """Return the config class of `target`.

    Args:
        target: A config class, a role, or a class that has a `Config`.

    Raises:
        TypeError: If `target` has no config class.
    """
    if isinstance(target, type) and issubclass(target, (Node, Role)):
        return target
    kind = getattr(target, "Config", None)
    if isinstance(kind, type) and issubclass(kind, Node):
        return kind
    raise TypeError(f"{target!r} has no Config")


def get(tree: object, path: str, *, hint: bool = True) -> Any:
    """Return the value at a path.

    Args:
        tree: A config.
        path: A dotted path.
        hint: Add the nearest names to the error.

    Raises:
        ConfigError: If the path does not exist.
    """
    return _locate(tree, path, hint=hint)[1]


def locate(tree: object, path: str, *, hint: bool = True) -> str:
    """Return a path with all wrappers on the way: `attention.num_heads` -> `attention.inner.num_heads`.

    The last part may be a new key of a mapping.

    Raises:
        ConfigError: If the path does not exist.
    """
    parent, _, name = path.rpartition(".")
    try:
        prefix, value = _locate(tree, parent, hint=False)
    except ConfigError:  # report the whole path
        prefix, value = "", None
    return join(prefix, name) if path and isinstance(value, Mapping) else _locate(tree, path, hint=hint)[0]


def _locate(tree: object, path: str, *, hint: bool) -> tuple[str, Any]:
    value, prefix = tree, ""
    parts = path.split(".") if path else []
    for i, name in enumerate(parts):
        outer, outer_prefix = value, prefix
        while (below := _child(value, name)) is _MISSING and (wrapper := wrapped_node(value)):
            prefix, value = join(prefix, wrapper[0]), wrapper[1]
        if below is _MISSING:
            raise ConfigError(no_such_path(path, outer_prefix, ".".join(parts[i:]), outer, hint=hint))
        value, prefix = below, join(prefix, name)
    return prefix, value


def leave_out_wrappers(tree: object, path: str) -> str:
    """Return a path without the wrappers on the way: `attention.inner.num_heads` -> `attention.num_heads`.

    Parts that the tree does not have are kept.
    """
    value, short = tree, []
    for name in path.split(".") if path else []:
        wrapper = wrapped_node(value)
        if not wrapper or name != wrapper[0]:
            short.append(name)
        value = _child(value, name)
    return ".".join(short)


def slot_path(tree: object, path: str) -> str:
    """Return a path without the wrappers and alternatives on the way (see `axlearn_core.config.wrappers`).

    A node in one alternative (`feed_forward.children.1.up`) has the slot `feed_forward.up`, and a wrapped node (`query.base`,
    `attention.base.query`) the slot of its wrapper (`query`, `attention.query`).
    """
    value, parts, slot = tree, path.split(".") if path else [], []
    while parts:
        nodes = wrapped_nodes(value)
        count = next((n for n in (1, 2) if ".".join(parts[:n]) in nodes), 0)
        if count:
            value, parts = nodes[".".join(parts[:count])], parts[count:]
        else:
            slot.append(parts[0])
            value, parts = children(value)[parts[0]], parts[1:]
    return ".".join(slot)


def no_such_path(path: str, parent: str, rest: str, value: object, *, hint: bool = True) -> Problem:
    """Describe a path that fails at `parent` because `value` has no child with the first name of `rest`.

    If `value` stands for other nodes, the nearest names include those of these nodes.
    """
    name = rest.partition(".")[0]
    kind = type(value).__qualname__ if isinstance(value, Node) else f"a {type(value).__name__}"
    nodes = dict(slot_nodes(value, parent)) or {parent: value}
    names = {join(p, k): k for p, node in nodes.items() for k in children(node)}
    same = [p for p, k in names.items() if k == name]
    close = nearest(name, set(names.values())) if hint and not same else []
    fix = None
    if name == "type" and parent:
        fix = f"to use another component: '{parent}={{type: NAME}}'"
    elif same:
        tail = rest.removeprefix(name)
        fix = f"{kind} has several components; name one of them: {', '.join(p + tail for p in same[:4])}"
    below = [*names] if wrapped_node(value) else [join(parent, k) for k in children(value)]
    return Problem(
        path=path,
        message=f"no {name!r} in {parent or 'the root'} ({kind})",
        expected=f"one of {', '.join(below)}"
        if below
        else f"a path that ends at {parent!r}, which is the value {show(value)}",
        nearest=[next(p for p in names if names[p] == n) for n in close],
        fix=fix,
    )


def expand(tree: object, pattern: str, *, hint: bool = True) -> list[str]:
    """Return the paths that match a pattern, with all wrappers. A plain path may name a new key of a mapping.

    Raises:
        ConfigError: If nothing matches.
    """
    if "*" not in pattern:
        return [locate(tree, pattern, hint=hint)]
    paths = [path for path in find(tree, pattern) if path]
    if not paths:
        last = pattern.rpartition(".")[2]
        names = {p.rpartition(".")[2] for p, _ in walk(tree) if p}
        raise ConfigError(
            Problem(
                path=pattern,
                message="the pattern matches nothing",
                nearest=nearest(last, names),
                fix="`axlearn config show --flat` lists every path",
            )
        )
    return paths


Decode = Callable[[Any, str, Any], Any]  # (tree, concrete path, raw value) -> value


def patch(tree: object, edits: Mapping[str, Any], decode: Decode | None = None) -> Any:
    """Set several paths or patterns. Outer paths are set before inner ones.

    Args:
        tree: A config.
        edits: Values by path or pattern.
        decode: Converts a raw value from YAML for its path. If None, values are used unchanged.

    Raises:
        ConfigError: Lists every path that matches nothing and every invalid value.
    """
    problems: list[Problem] = []
    for pattern, value in sorted(edits.items(), key=lambda e: e[0].count(".")):
        try:
            # Only the first few problems show nearest names, which are slow to compute.
            for path in expand(tree, pattern, hint=len(problems) < SHOWN_PROBLEMS):
                tree = _set(tree, path.split(".") if path else [], decode(tree, path, value) if decode else value, "")
        except ConfigError as error:
            problems += [_name_component(problem, value) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return tree


def _name_component(problem: Problem, value: object) -> Problem:
    """Suggest `PATH={type: VALUE}` for an edit `PATH.type=VALUE`."""
    if not (isinstance(value, str) and problem.fix and "{type: NAME}" in problem.fix):
        return problem
    return attrs.evolve(problem, fix=problem.fix.replace("NAME", value))


def _set(tree: object, parts: list[str], value: object, parent: str) -> Any:
    if not parts:
        return value
    name, rest = parts[0], parts[1:]
    full_path = join(parent, name)
    if isinstance(tree, Node) and name in interface_fields(type(tree)):
        raise ConfigError(
            Problem(
                path=full_path,
                message="is passed by the parent and cannot be set",
                fix="set the parent's dimension instead",
            )
        )
    below = children(tree)
    if not isinstance(tree, (Node, Mapping, tuple)):
        raise ConfigError(
            Problem(
                path=full_path,
                message="is inside a value that the same pattern sets",
                got=show(tree),
                fix="use a pattern that matches only one of them",
            )
        )
    try:
        return with_children(tree, {name: _set(below.get(name), rest, value, full_path)})
    except ConfigError as error:
        if all(p.path.startswith(full_path) for p in error.problems):
            raise
        raise ConfigError(attrs.evolve(p, path=join(parent, p.path)) for p in error.problems) from None


def _lost_field(path: str, value: object, new: Node[Any]) -> Problem:
    name = path.rpartition(".")[2]
    return Problem(
        path=path,
        message=f"would be lost: {type(new).__qualname__} has no such field",
        got=show(value),
        fix=f"remove this replacement, or the component or setting; a feature can discard it with drop={name!r}",
    )


def replace_config(tree: object, target: object, new: Node[Any], drop: tuple[str, ...] = ()) -> Any:
    """Replace every `target` node with `new` and keep the fields that both have.

    A field of the old node, including its children, is kept if `new` has the field and leaves it at its default. Values that
    were set, and components that a subclass of the target adds, must not be lost. A subclass computes something that `new` does
    not know, so it must not be lost either.
    Replacement does not descend into the new nodes and does not match them again, so it is idempotent.

    Args:
        tree: A config.
        target: The class of the nodes to replace, or its `Config`.
        new: The replacement.
        drop: Names of fields that may be discarded; `type` allows replacing subclasses of the target.

    Raises:
        ConfigError: If nothing matches, or if such a value or component would be lost and is not in `drop`.
    """
    kind = config_class(target)
    defaults = {a.name: a.default for a in attrs.fields(type(new))}
    untouched = get_fields(new)
    target_fields = {a.name for a in attrs.fields(kind)} if issubclass(kind, Node) else None
    problems: list[Problem] = []
    count = 0

    def swap(value: object, path: str) -> Any:
        nonlocal count
        if isinstance(value, type(new)) and type(new) is not kind:
            count += 1
            return value  # replaced by an earlier call
        if not isinstance(value, kind):
            return with_children(value, {k: swap(v, join(path, k)) for k, v in children(value).items()})
        count += 1
        fields, old = attrs.fields(type(value)), get_fields(value)
        changed = [a.name for a in fields if old[a.name] != a.default]
        interfaces = interface_fields(type(value))
        added = [n for n, field in old.items() if target_fields and n not in target_fields and isinstance(field, Node)]
        lost = [
            n for n in dict.fromkeys((*changed, *added)) if n not in defaults and n not in drop and n not in interfaces
        ]
        problems.extend(_lost_field(join(path, name), old[name], new) for name in lost)
        extra = old.keys() - (target_fields or old.keys())
        acknowledged = "type" in drop or any(n in lost or n in drop or n in defaults for n in extra)
        if target_fields is not None and not acknowledged and not _computes(type(value), kind):
            problems.append(_lost_subclass(path, type(value), kind, type(new)))
        values = {name: old[name] for name in changed if name in defaults and untouched[name] == defaults[name]}
        return attrs.evolve(new, **values)

    result = swap(tree, "")
    if not count:
        kinds = sorted({type(v).__qualname__ for _, v in walk(tree) if isinstance(v, Node)})
        raise ConfigError(
            Problem(
                path="",
                message=f"nothing to replace: the tree has no {kind.__qualname__}",
                nearest=nearest(kind.__qualname__, kinds),
                expected=f"one of {', '.join(kinds)}",
            )
        )
    if problems:
        raise ConfigError(problems)
    return result


def _lost_subclass(path: str, subclass: type, kind: type, new: type) -> Problem:
    return Problem(
        path=path,
        message=f"would be lost: {new.__qualname__} does not compute what {subclass.__qualname__} adds",
        got=f"{subclass.__qualname__}, a subclass of {kind.__qualname__}",
        expected=kind.__qualname__,
        fix="remove this replacement, or the component; a feature can discard it with drop='type'",
    )


def _computes(kind: type, target: type) -> bool:
    """Return True if a config class computes the same function as another (see `Node.computes_like`)."""
    while kind is not target and (like := vars(kind).get("computes_like")):
        kind = like
    return kind is target


def find_slots(tree: object, protocol: type) -> dict[str, Any]:
    """Return the value of every slot annotated `Node[protocol]` by path. An empty slot has the value None."""
    nodes = find(tree, Node).items()
    return {join(path, n): children(node)[n] for path, node in nodes for n in list_slots(type(node), protocol)}


def replaced_nodes(before: object, after: object, pattern: str) -> dict[str, tuple[Node[Any], Any]]:
    """Return the nodes that match a pattern and were replaced by plain values other than None: path -> (node, value)."""

    def values(tree: object) -> dict[str, Any]:
        if "*" in pattern:
            return find(tree, pattern)
        try:
            return {pattern: get(tree, pattern, hint=False)}
        except ConfigError:  # a new key of a mapping, or a path inside a replaced node
            return {}

    old, new = values(before), values(after)
    return {
        path: (old[path], value)
        for path, value in new.items()
        if isinstance(old.get(path), Node) and not isinstance(value, Node) and value is not None
    }


Edit = Callable[[str, Any], Any]
"""Function from a path and its value to a new value, or None to keep it. It may raise `ConfigError` with relative paths."""
SKIP: Any = object()
"""An `Edit` returns this to keep a value and skip everything below it. It does not count as an edit."""


class _Edits:
    """Counts the edits during one walk and collects the problems."""

    def __init__(self, edit: Edit):
        self.edit, self.count = edit, 0
        self.problems: list[Problem] = []

    def attempt(self, value: Any, path: str) -> Any:
        """Return the new value, or None if the edit keeps the old one."""
        try:
            new = self.edit(path, value)
        except ConfigError as error:
            self.problems += [attrs.evolve(p, path=join(path, p.path) if p.path else path) for p in error.problems]
            return value
        self.count += new is not None and new is not SKIP
        return value if new is SKIP or new == value else new

    def check(self, no_match: Problem | None) -> None:
        """Raise the collected problems. If no edit was made, raise `no_match`."""
        if not self.problems and no_match is not None and not self.count:
            self.problems.append(no_match)
        if self.problems:
            raise ConfigError(self.problems)


def edit_nodes(tree: Any, edit: Edit, *, no_match: Problem | None, outermost: bool = False) -> Any:
    """Call `edit` on each node, children first. Unchanged values stay the same objects.

    Args:
        tree: A config.
        edit: Receives a path and a node with edited children.
        no_match: The problem to raise if `edit` keeps every node. If None, that is not an error.
        outermost: Visit parents first, and do not enter a node that `edit` replaced.

    Raises:
        ConfigError: Lists all problems that `edit` raised, with full paths, or `no_match`.
    """
    edits = _Edits(edit)

    def visit(value: Any, path: str) -> Any:
        if outermost and isinstance(value, Node) and (new := edits.attempt(value, path)) is not None:
            return new
        value = with_children(value, {k: visit(v, join(path, k)) for k, v in children(value).items()})
        new = edits.attempt(value, path) if isinstance(value, Node) and not outermost else None
        return value if new is None else new

    result = visit(tree, "")
    edits.check(no_match)
    return result


def set_fields(tree: Any, target: type, values: Mapping[str, Any], *, no_match: Problem) -> Any:
    """Set fields on every node of a class or role.

    Raises:
        ConfigError: Contains `no_match` if there is no such node.
    """
    kind = config_class(target)

    def set_on(_path: str, part: Node[Any]) -> Node[Any] | None:
        return attrs.evolve(part, **values) if isinstance(part, kind) else None

    return edit_nodes(tree, set_on, no_match=no_match)


def fill_slots(tree: Any, protocol: type, fill: Edit, *, no_match: Problem) -> Any:
    """Fill every slot annotated `Node[protocol]`, outermost slots first. Do not enter a filled slot.

    If a slot contains a wrapper, the wrapper stays, and the node that it wraps is the value of the slot.

    Args:
        tree: A config.
        protocol: The protocol that annotates the slots.
        fill: Receives the path and value of a slot and returns the new value. The old value may be None or an `alternate`.
        no_match: The problem to raise if there is no slot, or if `fill` keeps all of them.

    Raises:
        ConfigError: Lists all problems that `fill` raised, with full paths, or `no_match`.
    """
    edits = _Edits(fill)

    def visit(value: Any, path: str, slots: tuple[str, ...]) -> Any:
        below = {}
        for name, child in children(value).items():
            full = join(path, name)
            wrapper = wrapped_node(child)
            inside = list_slots(type(child), protocol) if isinstance(child, Node) else ()
            if name in slots and wrapper:
                below[name] = visit(child, full, (*inside, wrapper[0]))
                continue
            new = edits.attempt(child, full) if name in slots else None
            below[name] = visit(child, full, inside) if new is None else new
        return with_children(value, below)

    result = visit(tree, "", list_slots(type(tree), protocol) if isinstance(tree, Node) else ())
    edits.check(no_match)
    return result


def find_missing(tree: object) -> list[Problem]:
    """Return a problem for each required field that the user has not set."""
    paths = []
    for path, value in walk(tree):
        if isinstance(value, Node):
            below = get_fields(value)
            paths += [
                Problem(path=join(path, a.name), message=f"{type(value).__qualname__} needs a value", fix="set it")
                for a in attrs.fields(type(value))
                if below[a.name] is REQUIRED and not is_interface(a)
            ]
    return paths


def check(tree: object) -> Any:
    """Validate a config and return it. Raise one `ConfigError` that lists all problems."""
    problems = find_missing(tree)
    unset = {p.path.rpartition(".")[0] for p in problems}
    for path, value in walk(tree):
        if isinstance(value, Node) and path not in unset:
            wrong = [*value.validate(), *check_offers(value), *check_slots(value), *check_assets(value)]
            problems += [attrs.evolve(p, path=join(path, p.path) if p.path else path) for p in wrong]
    if problems:
        raise ConfigError(problems)
    return tree
