"""`configure`: turn any callable into a config node that is checked against its signature."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config.flat import qualified_name
from axlearn_core.config.node import (
    REQUIRED,
    RESERVED,
    Node,
    get_fields,
    get_parameters,
    interface,
    interface_fields,
    take,
)
from axlearn_core.config.types import freeze
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest

# A required parameter with one of these names receives the parent's value even if it is not listed.
OFFERED = frozenset(
    {
        *("rngs", "precision", "axes", "dim", "input_dim", "output_dim", "input_dims", "output_dims"),
        *("vocab_size", "max_steps", "sequence_length"),
    }
)


@attrs.frozen(kw_only=True, slots=True, cache_hash=True, repr=False)
class Configured(Node[Any]):
    """Base class for the nodes that `configure` creates, one subclass per callable."""

    def build(self, **offered: Any) -> Any:
        """Build nested nodes, then call the callable with this node's settings.

        If the callable needs a random key and the parent offers none, draw one from `rngs`. If it has both `dtype` and
        `param_dtype`, as flax modules do, take unset dtypes from the parent's `precision`.
        """
        cls, renames = type(self), _renames(type(self))
        if "key" in interface_fields(cls) and "key" not in offered and "rngs" in offered:
            offered = {**offered, "key": offered["rngs"].params()}
        node, rest = take(self, offered)
        precision = rest.pop("precision", None)  # flax uses this name for the precision of matrix multiplications
        rest |= _dtypes(cls, precision)
        settings, fields = {}, get_fields(node)
        for attribute in attrs.fields(cls):
            value = fields[attribute.name]
            if not _is_default(value, attribute):
                settings[attribute.name] = _build(value, offered)
            elif attribute.name in rest:  # offered, and not set by the user
                settings[attribute.name] = rest[attribute.name]
        for parameter in get_parameters(cls.owner):
            name = renames.get(parameter.name)
            if name in offered:
                settings[parameter.name] = offered[name]
            elif name is not None and parameter.default is parameter.empty:
                raise ConfigError(_not_offered(cls.owner, parameter.name, name, offered))
        return _call(cls.owner, settings)

    def __reduce__(self) -> Any:
        attributes = attrs.fields_dict(type(self))
        settings = {k: v for k, v in get_fields(self).items() if not _is_default(v, attributes[k])}
        return _restore, (type(self).owner, type(self).__interface__, settings)


def _is_default(value: Any, attribute: Any) -> bool:
    return value is attribute.default or (type(value) is type(attribute.default) and value == attribute.default)


def _build(value: object, offered: dict[str, Any]) -> Any:
    """Build `value` if it is a node, or each node in a tuple or mapping."""
    if isinstance(value, Node):
        return value.build(**offered)
    if isinstance(value, tuple) and any(isinstance(v, (Node, tuple)) for v in value):
        return tuple(_build(v, offered) for v in value)
    if isinstance(value, Mapping) and any(isinstance(v, Node) for v in value.values()):
        return {k: _build(v, offered) for k, v in value.items()}
    return value


def _dtypes(cls: object, precision: Any) -> dict[str, str]:
    names = {a.name for a in attrs.fields(cls)}
    if precision is None or not names >= {"dtype", "param_dtype"}:
        return {}
    return {"dtype": precision.compute, "param_dtype": precision.params}


def _call(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """Call a function by keyword. Pass positional-only parameters, and those before them, by position."""
    parameters = get_parameters(function)
    nameless = [i for i, p in enumerate(parameters) if p.name in settings and p.kind in _NAMELESS]
    arguments: list[Any] = []
    for parameter in parameters[: max(nameless, default=-1) + 1]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += settings.pop(parameter.name)
        else:
            arguments.append(settings.pop(parameter.name, parameter.default))
    return function(*arguments, **settings)


_NAMELESS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def _not_offered(function: object, parameter: str, name: str, offered: Mapping[str, Any]) -> Problem:
    return Problem(
        path=parameter,
        message=f"{_title(function)} requires {name!r}, which its parent does not offer",
        expected=f"one of {', '.join(sorted(offered))}",
        nearest=nearest(name, offered),
    )


def _restore(function: Callable[..., Any], names: tuple[str, ...], arguments: dict[str, Any]) -> Node[Any]:
    return configured_class(function, names)(**arguments)


def configure(function: Callable[..., Any], /, *interface_names: str, **settings: object) -> Node[Any]:
    """Create a node that calls `function` with `settings` when it is built.

    Args:
        function: A flax.nnx module class, an optax transformation, or any callable with a signature. The arguments of a
            `functools.partial` become settings.
        interface_names: Parameters that the parent passes at build time, as "param" or "param=offered name"
            (`configure(nnx.RMSNorm, "num_features=dim")`). Common names such as `rngs` and `dim` need not be listed.
        settings: Values or nodes for the other parameters. Pass variadic arguments as a tuple under the name of `*args`.

    Raises:
        RequestError: If `function` has no signature, or has no parameter with the name of a setting.
    """
    while isinstance(function, functools.partial):
        positional = (p.name for p in get_parameters(function.func))
        settings = {**dict(zip(positional, function.args, strict=False)), **function.keywords, **settings}
        function = function.func
    cls = configured_class(function, interface_names)
    names = [a.name for a in attrs.fields(cls)]
    for name in settings:
        if name not in names:
            raise _unknown_parameter(function, name, names)
    return cls(**settings)


def _unknown_parameter(function: object, name: str, names: Sequence[str]) -> RequestError:
    close = nearest(name, names)
    hint = f"did you mean: {', '.join(close)}?" if close else f"its parameters: {', '.join(names)}"
    return RequestError(f"{_title(function)} has no parameter {name!r}; {hint}")


def configured_class(function: Callable[..., Any], interface_names: tuple[str, ...] = ()) -> type[Node[Any]]:
    """Return the node class for a callable. The class is cached."""
    return _make_class(
        function, interface_names
    )  # pass both, because the cache would treat f(a) and f(a, ()) as different calls


@functools.cache
def _make_class(function: Callable[..., Any], interface_names: tuple[str, ...]) -> type[Node[Any]]:
    offered_fields = dict(_split(n) for n in interface_names)
    fields: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    hints = _hints(function)
    try:
        parameters = get_parameters(function)
    except ValueError as error:  # some functions implemented in C have no signature
        raise RequestError(f"{_title(function)} has no signature\n    fix: wrap it in a Python function") from error
    for name in offered_fields:
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if name not in names:
            raise _unknown_parameter(function, name, names)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        name, required = parameter.name, parameter.default is parameter.empty
        if name in offered_fields:
            continue  # passed by the parent at build time
        if name in RESERVED:
            raise RequestError(f"{_title(function)} has a parameter {name!r}, which is a reserved name of nodes")
        annotations[name] = Any
        if parameter.kind is parameter.VAR_POSITIONAL:
            fields[name] = attrs.field(default=())
        elif required and (name in OFFERED or _is_random_key(parameter, hints.get(name))):
            fields[name] = interface()
        else:
            fields[name] = attrs.field(default=REQUIRED if required else freeze(parameter.default))
            annotations[name] = _checked_annotation(hints.get(name, Any))
    body = {
        **fields,
        "__annotations__": annotations,
        "__module__": function.__module__ or __name__,
        "__qualname__": f"configure({_title(function)})",
        "__doc__": inspect.getdoc(function),
        "__configured__": True,
        "__interface__": interface_names,
        "__reduce__": Configured.__reduce__,
    }
    cls = attrs.frozen(kw_only=True, slots=True, cache_hash=True, repr=False)(type("Configured", (Configured,), body))
    cls.owner = function
    return cls


def _is_random_key(parameter: inspect.Parameter, annotation: object) -> bool:
    """Return True for a keyword-only `key`, the convention of Equinox modules."""
    return parameter.name == "key" and parameter.kind is parameter.KEYWORD_ONLY and annotation not in (str, int)


def _split(name: str) -> tuple[str, str]:
    param, _, offered = name.partition("=")
    return param, offered or param


def _renames(cls: Any) -> dict[str, str]:
    return dict(_split(n) for n in cls.__interface__)


def _title(function: object) -> str:
    return qualified_name(function).replace(":", ".")


def _hints(function: object) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations in other libraries may use names that are imported only for type checking


def _checked_annotation(annotation: object) -> Any:
    """Return the annotation if it consists of plain scalars, which are checked exactly. Otherwise return Any."""
    plain = (bool, int, float, str, type(None))
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if all(m in plain or typing.get_origin(m) is typing.Literal for m in members):
        return annotation | Node if not isinstance(annotation, str) else Any
    return Any


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def with_subclass(cfg: Node[Any], make_subclass: Callable[[type], type]) -> Node[Any]:
    """Return a config that builds a subclass of the module class with the settings of `cfg`.

    A subclass can add attributes or override `__call__` and keep the paths of its parameters. A wrapper module would add
    its name to those paths.

    Args:
        cfg: Config of a class that has a `Config`, or of a class passed to `configure`.
        make_subclass: Returns a subclass of the given class. It must return the same subclass every time, so that equal
            modules stay equal.

    Raises:
        ConfigError: If `cfg` calls a function or overrides `build`, so that the class is unknown until it is built.
    """
    owner = type(cfg).owner
    if isinstance(cfg, Configured) and isinstance(owner, type):
        cls: Any = configured_class(make_subclass(owner), type(cfg).__interface__)
    elif isinstance(owner, type) and type(cfg).build is Node.build:
        subclass: Any = make_subclass(owner)
        cls = subclass.Config
    else:
        raise ConfigError(
            Problem(
                path="base",
                message="cannot be extended: its class is unknown until it is built",
                got=qualified_name(type(cfg) if owner is None or not isinstance(cfg, Configured) else owner),
                expected="a class with a Config that does not override `build`, or `configure` of a class",
                fix="define a Config on the module's class, or exclude the module from the targets",
            )
        )
    return cls(**get_fields(cfg))
