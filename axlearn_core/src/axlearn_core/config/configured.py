"""`configure`: any callable as a config node, checked against its signature."""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import attrs

from axlearn_core.config.node import REQUIRED, RESERVED, Node, accepted, interface, take
from axlearn_core.config.types import freeze
from axlearn_core.errors import RequestError, nearest

# What parents offer under these names is taken without being asked for, where the callable has no default for it.
OFFERED = frozenset({"rngs", "dim", "input_dim", "output_dim", "vocab_size", "max_steps", "sequence_length"})


@attrs.frozen(kw_only=True, slots=True, cache_hash=True)
class Configured(Node[Any]):
    """The base of the nodes that `configure` makes, one class per callable."""

    def build(self, **offered: Any) -> Any:
        """Calls the callable with this node's settings, building the nodes among them first."""
        made, rest = take(self, offered)
        owner, renames = type(self).owner, _renames(type(self))
        settings = {}
        for attribute in attrs.fields(type(made)):
            value = getattr(made, attribute.name)
            if value == attribute.default and attribute.name in rest:
                value = rest[attribute.name]  # offered, and not set by the user
            settings[attribute.name] = value.build(**offered) if isinstance(value, Node) else value
        settings |= {param: offered[name] for param, name in renames.items() if name in offered}
        return owner(**(accepted(owner, {k: v for k, v in rest.items() if k not in settings}) | settings))

    def __reduce__(self) -> Any:
        given = {a.name: getattr(self, a.name) for a in attrs.fields(type(self)) if getattr(self, a.name) != a.default}
        return _restore, (type(self).owner, type(self).__interface__, given)  # type: ignore[attr-defined]


def _restore(function: Callable[..., Any], names: tuple[str, ...], given: dict[str, Any]) -> Node[Any]:
    return configured_class(function, names)(**given)


def configure(function: Callable[..., Any], /, *interface_names: str, **settings: Any) -> Node[Any]:
    """A node that calls `function` with `settings` when it is built.

    Args:
        function: an optax transformation, a Flax module, any callable with a signature.
        interface_names: parameters that the parent fills at build, as "param" or "param=offered name"
            (`configure(nnx.RMSNorm, "num_features=dim")`). `rngs`, `dim` and the like are taken without being named.
        settings: values or nodes for the other parameters.

    Raises:
        RequestError: `settings` names a parameter that `function` does not have.
    """
    cls = configured_class(function, interface_names)
    known = [a.name for a in attrs.fields(cls)]
    for name in settings:
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean: {', '.join(close)}?" if close else f"it takes: {', '.join(known)}"
            raise RequestError(f"{_title(function)} takes no {name!r}; {hint}")
    return cls(**settings)


def configured_class(function: Callable[..., Any], interface_names: tuple[str, ...] = ()) -> type[Node[Any]]:
    """The node class for a callable; the same one every time."""
    return _made(function, interface_names)  # one spelling of the call: a cache tells `f(a)` from `f(a, ())`


@functools.cache
def _made(function: Callable[..., Any], interface_names: tuple[str, ...]) -> type[Node[Any]]:
    wanted = dict(_split(n) for n in interface_names)
    fields: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    hints = _hints(function)
    parameters = inspect.signature(function).parameters
    for name in wanted:
        if name not in parameters:
            raise RequestError(f"{_title(function)} takes no {name!r}; it takes: {', '.join(parameters)}")
    for parameter in parameters.values():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            continue
        name, required = parameter.name, parameter.default is parameter.empty
        if name in wanted:
            continue  # filled at build, straight from what is offered
        if name in RESERVED:
            raise RequestError(f"{_title(function)} has a parameter {name!r}, a name that every node uses itself")
        if required and name in OFFERED:
            fields[name], annotations[name] = interface(), Any
            continue
        fields[name] = attrs.field(default=REQUIRED if required else freeze(parameter.default))
        annotations[name] = _admitted(hints.get(name, Any))
    body = {
        **fields,
        "__annotations__": annotations,
        "__module__": getattr(function, "__module__", __name__),
        "__qualname__": f"configure({_title(function)})",
        "__doc__": inspect.getdoc(function),
        "__configured__": True,
        "__interface__": interface_names,
        "__reduce__": Configured.__reduce__,
    }
    made = attrs.frozen(kw_only=True, slots=True, cache_hash=True)(type("Configured", (Configured,), body))
    made.owner = function
    return made


def _split(name: str) -> tuple[str, str]:
    param, _, offered = name.partition("=")
    return param, offered or param


def _renames(cls: Any) -> dict[str, str]:
    return dict(_split(n) for n in cls.__interface__)


def _title(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations of other libraries may name what only their type checker imports


def _admitted(annotation: Any) -> Any:
    """The annotation where it is made of plain scalars, which are then checked exactly; else anything."""
    plain = (bool, int, float, str, type(None))
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if all(m in plain or typing.get_origin(m) is typing.Literal for m in members):
        return annotation | Node if not isinstance(annotation, str) else Any
    return Any


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
