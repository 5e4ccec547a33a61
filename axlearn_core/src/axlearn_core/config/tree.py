"""Edits and questions over config trees. Every edit returns a new tree; what it did not touch is the same object.

A path is dotted: field names of nodes, keys of mappings, indices of tuples (`trackers.0.every_steps`). In a pattern,
`*` stands for any one part and `**` for any number of parts, none included.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from immutabledict import immutabledict

from axlearn_core.config.node import REQUIRED, Node, fields_of, interface_fields, is_interface
from axlearn_core.config.offers import refused
from axlearn_core.config.roles import Role
from axlearn_core.config.run_scheme import unattached
from axlearn_core.config.slots import slots_of, wrong_parts
from axlearn_core.config.types import show
from axlearn_core.errors import SHOWN_PROBLEMS, ConfigError, Problem, nearest


def children(value: object) -> dict[str, Any]:
    """What is directly below `value`: the fields of a node, the items of a tuple or mapping; empty for a leaf."""
    if isinstance(value, Node):
        return fields_of(value)
    if isinstance(value, tuple):
        return {str(i): v for i, v in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(k): v for k, v in value.items()}
    return {}


def with_children(value: Any, new: Mapping[str, Any]) -> Any:
    """`value` with some of its children replaced; the same object where none of them differs."""
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
    """`path.name`, or `name` at the root."""
    return f"{path}.{name}" if path else name


def walk(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for the tree and everything below it, parents first."""
    yield path, tree
    for name, child in children(tree).items():
        yield from walk(child, join(path, name))


def map(tree: object, function: Callable[[Any], Any]) -> Any:  # the name of this operation everywhere
    """Rebuilds bottom-up: `function` gets each node with its children mapped; what it returns is not revisited."""
    tree = with_children(tree, {k: map(v, function) for k, v in children(tree).items()})
    return function(tree) if isinstance(tree, Node) else tree


def matches(pattern: str, path: str) -> bool:
    """Whether a dotted path fits a pattern of `*` and `**` (a part may itself hold `*`, as in `layer*`)."""
    parts = pattern.split(".") if pattern else []
    # Several `**` in a row stand for what one does, and would be tried in every way.
    parts = [p for i, p in enumerate(parts) if p != "**" or parts[i - 1 : i] != ["**"]]
    return _fits(parts, path.split(".") if path else [])


def _fits(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(pattern[1:], parts[i:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(pattern[1:], parts[1:])


def find(tree: object, query: str | type) -> dict[str, Any]:
    """Path -> value for all that fit a path pattern, or all nodes of a class (`RMSNorm` or `RMSNorm.Config`) or role."""
    if isinstance(query, str):
        return {p: v for p, v in walk(tree) if matches(query, p)}
    kind = config_class(query)
    return {p: v for p, v in walk(tree) if isinstance(v, kind)}


def config_class(target: object) -> type:
    """The config class of `target`, which may be that class, a role, its owner, or a callable given to `configure`."""
    if isinstance(target, type) and issubclass(target, (Node, Role)):
        return target
    kind = getattr(target, "Config", None)
    if isinstance(kind, type) and issubclass(kind, Node):
        return kind
    raise TypeError(f"{target!r} has no Config")


def get(tree: object, path: str, *, hint: bool = True) -> Any:
    """The value at a path; raises `ConfigError`, with the nearest names where `hint`, where there is none."""
    value = tree
    prefix = ""
    for name in path.split(".") if path else []:
        below = children(value)
        if name not in below:
            raise ConfigError(no_such_path(path, prefix, name, value, hint=hint))
        value, prefix = below[name], join(prefix, name)
    return value


def no_such_path(path: str, at: str, name: str, value: object, *, hint: bool = True) -> Problem:
    """The problem of a path that stops at `at`, where `value` has nothing called `name`."""
    below = children(value)
    kind = type(value).__qualname__ if isinstance(value, Node) else f"a {type(value).__name__}"
    names = ", ".join(join(at, k) for k in below)
    return Problem(
        path=path,
        message=f"no {name!r} in {at or 'the root'} ({kind})",
        expected=f"one of {names}" if below else f"nothing below {at!r}: it is a value, {show(value)}",
        nearest=[join(at, n) for n in nearest(name, below)] if hint else (),
        fix=f"to put another component there: '{at}={{type: NAME}}'" if name == "type" and at else None,
    )


def expand(tree: object, pattern: str, *, hint: bool = True) -> list[str]:
    """The paths that a pattern stands for, at least one, or `ConfigError`; a plain path may add a key to a mapping."""
    if "*" not in pattern:
        parent = pattern.rpartition(".")[0]
        if not (pattern and isinstance(get(tree, parent, hint=hint), Mapping)):
            get(tree, pattern, hint=hint)
        return [pattern]
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
    """Sets each path or pattern to its value, all edits together, outer paths before the ones inside them.

    Args:
        tree: the config.
        edits: path or pattern -> value.
        decode: turns a raw value (from YAML) into one that fits the path; values are taken as they are without it.

    Raises:
        ConfigError: every path that matches nothing and every value that does not fit, at once.
    """
    problems: list[Problem] = []
    for pattern, value in sorted(edits.items(), key=lambda e: e[0].count(".")):
        try:
            # Nearest names take longer than all the rest, and are printed with the first problems only.
            for path in expand(tree, pattern, hint=len(problems) < SHOWN_PROBLEMS):
                tree = _set(tree, path.split(".") if path else [], decode(tree, path, value) if decode else value, "")
        except ConfigError as error:
            problems += [_name_component(problem, value) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return tree


def _name_component(problem: Problem, value: object) -> Problem:
    """The problem of an edit `PATH.type=VALUE`, with the edit that was meant as its fix."""
    if not (isinstance(value, str) and problem.fix and "{type: NAME}" in problem.fix):
        return problem
    return attrs.evolve(problem, fix=problem.fix.replace("NAME", value))


def _set(tree: object, parts: list[str], value: object, at: str) -> Any:
    if not parts:
        return value
    name, rest = parts[0], parts[1:]
    full_path = join(at, name)
    if isinstance(tree, Node) and name in interface_fields(type(tree)):
        raise ConfigError(
            Problem(
                path=full_path,
                message="is passed by the parent and cannot be set",
                fix="set the parent's own dimension instead",
            )
        )
    below = children(tree)
    if not isinstance(tree, (Node, Mapping, tuple)):
        raise ConfigError(
            Problem(
                path=full_path,
                message="is below a value that the same pattern sets",
                got=show(tree),
                fix="take a pattern that fits either the one or the other",
            )
        )
    try:
        return with_children(tree, {name: _set(below.get(name), rest, value, full_path)})
    except ConfigError as error:
        if all(p.path.startswith(full_path) for p in error.problems):
            raise
        raise ConfigError(attrs.evolve(p, path=join(at, p.path)) for p in error.problems) from None


def replace_config(tree: object, target: object, new: Node[Any], drop: tuple[str, ...] = ()) -> Any:
    """Puts `new` in the place of every `target` node, keeping what both have in common.

    Each field of the old node that `new` also has, and leaves at its default, is carried over, children too. It neither
    descends into nor matches again what it just placed, so applying it twice is applying it once.

    Args:
        tree: the config.
        target: the class whose nodes are replaced (or its `Config`).
        new: the node to put there.
        drop: fields of the old nodes that may be lost.

    Raises:
        ConfigError: a field that was set would be lost and `drop` does not name it, or nothing matches.
    """
    kind = config_class(target)
    defaults = {a.name: a.default for a in attrs.fields(type(new))}
    untouched = fields_of(new)
    problems: list[Problem] = []
    count = 0

    def swap(value: object, path: str) -> Any:
        nonlocal count
        if isinstance(value, type(new)) and type(new) is not kind:
            count += 1
            return value  # placed before
        if not isinstance(value, kind):
            return with_children(value, {k: swap(v, join(path, k)) for k, v in children(value).items()})
        count += 1
        fields, old = attrs.fields(type(value)), fields_of(value)
        changed = [a.name for a in fields if old[a.name] != a.default]
        interfaces = interface_fields(type(value))
        lost = [n for n in changed if n not in defaults and n not in drop and n not in interfaces]
        problems.extend(
            Problem(
                path=join(path, name),
                message=f"would be lost: {type(new).__qualname__} has no such field",
                got=show(old[name]),
                fix=f"name {name!r} in drop= to let it go",
            )
            for name in lost
        )
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


def find_slots(tree: object, protocol: type) -> dict[str, Any]:
    """Path -> value of every slot that is annotated `Node[protocol]`; the value of an empty slot is None."""
    nodes = find(tree, Node).items()
    return {join(path, n): children(node)[n] for path, node in nodes for n in slots_of(type(node), protocol)}


Edit = Callable[[str, Any], Any]
"""(path, value) -> the value to put there, or None to leave it. A `ConfigError` may have paths relative to that path."""
SKIP: Any = object()
"""An edit returns this to leave a value and everything below it. It does not count as an edit."""


class _Edits:
    """The edits of one walk: how many were made, and the problems of those that failed."""

    def __init__(self, edit: Edit):
        self.edit, self.count = edit, 0
        self.problems: list[Problem] = []

    def attempt(self, value: Any, path: str) -> Any:
        """Returns the value to put in place, or None if the edit leaves it."""
        try:
            new = self.edit(path, value)
        except ConfigError as error:
            self.problems += [attrs.evolve(p, path=join(path, p.path) if p.path else path) for p in error.problems]
            return value
        self.count += new is not None and new is not SKIP
        return value if new is SKIP or new == value else new

    def check(self, nothing: Problem | None) -> None:
        """Raises the problems; or `nothing`, if no edit was made."""
        if not self.problems and nothing is not None and not self.count:
            self.problems.append(nothing)
        if self.problems:
            raise ConfigError(self.problems)


def edit_nodes(tree: Any, edit: Edit, *, nothing: Problem | None, outermost: bool = False) -> Any:
    """Offers each node to `edit` and puts the result in place. Unchanged values stay the same objects.

    Args:
        tree: the config.
        edit: gets a node with its children edited already.
        nothing: the problem if `edit` leaves every node; None accepts that.
        outermost: start at the root instead, and do not look below a node that `edit` replaced.

    Raises:
        ConfigError: all problems that `edit` raises, with full paths; or `nothing`.
    """
    edits = _Edits(edit)

    def visit(value: Any, path: str) -> Any:
        if outermost and isinstance(value, Node) and (new := edits.attempt(value, path)) is not None:
            return new
        value = with_children(value, {k: visit(v, join(path, k)) for k, v in children(value).items()})
        new = edits.attempt(value, path) if isinstance(value, Node) and not outermost else None
        return value if new is None else new

    result = visit(tree, "")
    edits.check(nothing)
    return result


def set_fields(tree: Any, target: type, values: Mapping[str, Any], *, nothing: Problem) -> Any:
    """Sets fields on every node of a class or role.

    Raises:
        ConfigError: `nothing`, if there is no such node.
    """
    kind = config_class(target)

    def set_on(_path: str, part: Node[Any]) -> Node[Any] | None:
        return attrs.evolve(part, **values) if isinstance(part, kind) else None

    return edit_nodes(tree, set_on, nothing=nothing)


def fill_slots(tree: Any, protocol: type, fill: Edit, *, nothing: Problem) -> Any:
    """Fills every slot that is annotated `Node[protocol]`, outermost slots first.

    Args:
        tree: the config. The walk does not enter a slot that was filled.
        protocol: the protocol that annotates the slots.
        fill: gets the path and the value of a slot, and returns the new value. The old one may be None or an `alternate`.
        nothing: the problem if there is no slot, or `fill` leaves all of them.

    Raises:
        ConfigError: all problems that `fill` raises, with full paths; or `nothing`.
    """
    edits = _Edits(fill)

    def visit(value: Any, path: str) -> Any:
        slots = slots_of(type(value), protocol) if isinstance(value, Node) else ()
        below = {}
        for name, child in children(value).items():
            new = edits.attempt(child, join(path, name)) if name in slots else None
            below[name] = visit(child, join(path, name)) if new is None else new
        return with_children(value, below)

    result = visit(tree, "")
    edits.check(nothing)
    return result


def missing(tree: object) -> list[Problem]:
    """Every field that is still `REQUIRED` and that the user has to set."""
    paths = []
    for path, value in walk(tree):
        if isinstance(value, Node):
            below = fields_of(value)
            paths += [
                Problem(path=join(path, a.name), message=f"{type(value).__qualname__} needs a value", fix="set it")
                for a in attrs.fields(type(value))
                if below[a.name] is REQUIRED and not is_interface(a)
            ]
    return paths


def check(tree: object) -> Any:
    """Returns the tree when nothing is missing and every node accepts its own fields; raises all problems at once."""
    problems = missing(tree)
    unset = {p.path.rpartition(".")[0] for p in problems}
    for path, value in walk(tree):
        if isinstance(value, Node) and path not in unset:
            wrong = [*value.validate(), *refused(value), *wrong_parts(value), *unattached(value)]
            problems += [attrs.evolve(p, path=join(path, p.path) if p.path else path) for p in wrong]
    if problems:
        raise ConfigError(problems)
    return tree
