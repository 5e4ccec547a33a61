"""Convert config trees to and from plain data with cattrs, and write YAML 1.2 with ruamel.yaml.

In a file, a node is a mapping whose `type:` names a registered component. A file can never name a Python object. All
problems in a file are reported together, with line numbers. `yaml_file` reads YAML.
"""

import collections.abc
import contextlib
import enum
import io
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import cattrs
import cattrs.gen
from ruamel.yaml import YAML

from axlearn_core.config.flat import qualified_name
from axlearn_core.config.node import (
    REQUIRED,
    Node,
    get_fields,
    hidden_defaults,
    interface_fields,
    is_node,
    resolve_hints,
)
from axlearn_core.config.tree import children, config_class, join
from axlearn_core.config.types import Mismatch, check_type, describe, show
from axlearn_core.errors import SHOWN_PROBLEMS, ConfigError, Problem, RequestError, nearest


class Names(Protocol):
    """Mapping between component names and config classes, such as the plugin registry."""

    def component(self, name: str) -> type[Node[Any]]:
        """Return the config class registered as `name`. Raise `RequestError` with the nearest names if it is unknown."""
        ...

    def get_name(self, cls: type) -> str:
        """Return the registered name of a config class. Raise `RequestError` if it has none."""
        ...


@runtime_checkable
class NamesValues(Protocol):
    """`Names` that can also format values that a file cannot store."""

    def format_value(self, value: object) -> str:
        """Return the value as human-readable text."""
        ...


class QualifiedNames:
    """Names of the form `module:Class`, for printing a tree without a registry. They cannot be read back."""

    def component(self, name: str) -> type[Node[Any]]:
        """Raise `RequestError`: nothing is registered."""
        raise RequestError(f"no component is registered as {name!r}")

    def get_name(self, cls: type) -> str:
        """Return `module:Class`."""
        return qualified_name(cls)


def encode(value: object, names: Names) -> Any:
    """Convert a tree to dicts, lists, and scalars. Omit fields that are still `REQUIRED`."""
    if isinstance(value, Node):
        hidden = interface_fields(type(value)) | hidden_defaults(value) | _find_code_defaults(value)
        fields = {k: encode(v, names) for k, v in children(value).items() if k not in hidden and v is not REQUIRED}
        return {"type": names.get_name(type(value)), **fields}
    if isinstance(value, Mapping):
        return {k: encode(v, names) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(v, names) for v in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(names, NamesValues):
        return names.format_value(value)
    raise RequestError(
        f"a config file can store only plain values and nodes, not {show(value)}; make it a registered component"
    )


def _find_code_defaults(value: Node[Any]) -> set[str]:
    """Return the fields of a configured callable whose defaults, such as dtypes, cannot be stored in a file."""
    if not type(value).__configured__:
        return set()
    fields = get_fields(value)
    return {
        a.name
        for a in attrs.fields(type(value))
        if fields[a.name] is a.default
        and not (a.default is None or isinstance(a.default, (bool, int, float, str, tuple, Mapping, enum.Enum)))
    }


def dump(data: object) -> str:
    """Convert plain data to YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


class Decoder:
    """Converts plain data to nodes with cattrs and strict hooks that never coerce types."""

    def __init__(self, names: Names):
        self.names = names
        self.converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
        self._generated: dict[type, Any] = {}
        hook = self.converter.register_structure_hook_func
        for scalar in (bool, int, float, str):
            self.converter.register_structure_hook(scalar, self._plain)
        hook(lambda t: t not in (bool, int, float, str), self._plain)
        hook(_is_sequence, self._sequence)
        hook(_is_mapping, self._mapping)
        hook(_is_union, self._union)
        hook(_is_node_type, self._node)

    def decode(self, data: Any, annotation: Any, path: str = "") -> Any:
        """Convert `data` to the annotated type. Raise one `ConfigError` that lists every problem and its path."""
        try:
            return self.converter.structure(data, annotation)
        except (
            cattrs.BaseValidationError,
            Mismatch,
            ConfigError,
            RequestError,
            cattrs.ForbiddenExtraKeysError,
        ) as error:
            raise ConfigError(_problems(error, path)) from None

    def decode_value(self, tree: object, path: str, data: object) -> Any:
        """Convert `data` to the type of a path. A mapping without `type` edits the existing node. Used by `patch`."""
        annotation, current = _slot(tree, path)
        if isinstance(current, Node) and isinstance(data, Mapping) and "type" not in data:
            hints, problems, changes = resolve_hints(type(current)), [], {}
            for key, value in data.items():
                try:
                    if key not in hints or key in interface_fields(type(current)):
                        raise ConfigError(_unknown_key(type(current), str(key), len(problems)))
                    changes[key] = self.decode_value(current, key, value)
                except ConfigError as error:
                    problems += error.problems
            if problems:
                raise ConfigError(attrs.evolve(p, path=join(path, p.path)) for p in problems)
            with _prefix_problems(path):
                return attrs.evolve(current, **changes)
        return self.decode(data, annotation, path)

    def _plain(self, data: object, annotation: object) -> Any:
        if annotation is not Any:
            return check_type(data, annotation, is_node)
        if isinstance(data, Mapping):  # an untyped field may hold nodes
            if isinstance(data.get("type"), str):
                return self._node(data, Node)
            return self._decode_all({k: (v, Any) for k, v in data.items()})
        if isinstance(data, (list, tuple)):
            return self._sequence(data, tuple)
        return data

    def _sequence(self, data: object, annotation: object) -> Any:
        if not isinstance(data, (list, tuple)):
            raise Mismatch(describe(annotation), data)
        args = typing.get_args(annotation)
        fixed = bool(args) and args[-1] is not ...
        if fixed and len(args) != len(data):
            raise Mismatch(f"{describe(annotation)} ({len(args)} items)", data)
        kinds = args if fixed else [args[0] if args else Any] * len(data)
        return tuple(
            self._decode_all({str(i): (v, k) for i, (v, k) in enumerate(zip(data, kinds, strict=True))}).values()
        )

    def _mapping(self, data: object, annotation: object) -> Any:
        if not isinstance(data, Mapping):
            raise Mismatch(describe(annotation), data)
        key, value = typing.get_args(annotation) or (str, Any)
        return self._decode_all({check_type(k, key, is_node): (v, value) for k, v in data.items()})

    def _decode_all(self, items: Mapping[Any, tuple[Any, Any]]) -> dict[Any, Any]:
        """Decode each pair of value and annotation. Raise one error that lists all problems."""
        values, problems = {}, []
        for name, (data, annotation) in items.items():
            try:
                values[name] = self.converter.structure(data, annotation)
            except (cattrs.BaseValidationError, Mismatch, ConfigError, RequestError) as error:
                problems += _problems(error, str(name))
        if problems:
            raise ConfigError(problems)
        return values

    def _union(self, data: object, annotation: object) -> Any:
        nodes = [a for a in typing.get_args(annotation) if _is_node_type(a)]
        if nodes and isinstance(data, Mapping) and "type" in data:
            return self.converter.structure(data, nodes[0])
        if isinstance(data, (list, tuple)):
            for arm in typing.get_args(annotation):
                if _is_sequence(arm):
                    return self._sequence(data, arm)
        if isinstance(data, Mapping):
            for arm in typing.get_args(annotation):
                if _is_mapping(arm):
                    return self._mapping(data, arm)
        return check_type(data, annotation, is_node)

    def _node(self, data: Any, annotation: Any) -> Any:
        if isinstance(data, Node):
            return data
        kind = typing.get_origin(annotation) or annotation
        exact = kind is not Node  # annotated with a config class, not with Node[Protocol]
        if not isinstance(data, Mapping):
            example = f", such as {{type: {data}}}" if isinstance(data, str) and data else ""
            raise Mismatch(f"a mapping with `type:`{example}", data)
        fields = {k: v for k, v in data.items() if k != "type"}
        if "type" in data:
            if not isinstance(data["type"], str):
                raise Mismatch("the name of a component", data["type"], ("type",))
            try:
                cls = config_class(self.names.component(data["type"]))
            except RequestError as error:
                raise ConfigError(Problem(path="type", message=str(error))) from None
        elif exact:
            cls = kind
        else:
            raise ConfigError(Problem(path="type", message="is missing", expected="the name of a component"))
        strange = [str(k) for k in fields if k not in resolve_hints(cls) or k in interface_fields(cls)]
        problems = [_unknown_key(cls, key, i) for i, key in enumerate(strange)]
        bad = {p.path for p in problems}
        if cls not in self._generated:
            self._generated[cls] = cattrs.gen.make_dict_structure_fn(
                cls, self.converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True
            )
        try:
            node = self._generated[cls]({k: v for k, v in fields.items() if str(k) not in bad}, cls)
        except cattrs.ClassValidationError as error:
            problems += _problems(error, "")
        if problems:
            raise ConfigError(problems)
        return node  # pyright: ignore[reportPossiblyUnboundVariable]  # unbound only when there are problems


@contextlib.contextmanager
def _prefix_problems(path: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(attrs.evolve(p, path=join(path, p.path)) for p in error.problems) from None


def _slot(tree: object, path: str) -> tuple[Any, Any]:
    """Return the annotation and value at a path. The value of a new mapping key is None."""
    annotation: Any = Any
    value = tree
    for name in path.split(".") if path else []:
        if isinstance(value, Node):
            annotation = resolve_hints(type(value))[name]
        else:
            arms = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
            inner = next((a for a in arms if _is_mapping(a) or _is_sequence(a)), Any)
            args = typing.get_args(inner)
            if not args:
                annotation = Any
            elif _is_mapping(inner):
                annotation = args[1]
            else:
                annotation = args[0] if args[-1] is ... else args[int(name)]
        value = children(value).get(name)
    return annotation, value


def _unknown_key(cls: Any, key: str, number: int = 0) -> Problem:
    names = [n for n in resolve_hints(cls) if n not in interface_fields(cls)]
    if key in interface_fields(cls):
        return Problem(path=key, message=f"is passed to {cls.__qualname__} by its parent and cannot be set")
    return Problem(
        path=key,
        message=f"unknown key of {cls.__qualname__}",
        expected=f"one of {', '.join(names)}" if names else "no keys: it has no settings",
        nearest=nearest(key, names) if number < SHOWN_PROBLEMS else (),  # slow to compute
    )


def _problems(error: BaseException, path: str) -> list[Problem]:
    """Flatten the exceptions of cattrs into problems with paths."""
    if isinstance(error, cattrs.ClassValidationError):
        with_notes, without = error.group_exceptions()
        problems = [p for inner, note in with_notes for p in _problems(inner, join(path, note.name))]
        return problems + [p for inner in without for p in _problems(inner, path)]
    if isinstance(error, ConfigError):
        return [attrs.evolve(p, path=join(path, p.path) if p.path else path) for p in error.problems]
    if isinstance(error, Mismatch):
        path = ".".join((path, *error.path)) if path else ".".join(error.path)
        return [Problem(path=path, message="wrong type", got=show(error.got), expected=error.expected)]
    return [Problem(path=path, message=str(error))]


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_sequence(kind: object) -> bool:
    return kind is tuple or typing.get_origin(kind) is tuple


def _is_mapping(kind: object) -> bool:
    return kind is Mapping or typing.get_origin(kind) in (collections.abc.Mapping, dict)


def _is_node_type(kind: object) -> bool:
    return is_node(typing.get_origin(kind) or kind)
