"""Config nodes: frozen attrs classes linked to the class that they configure.

    class RMSNorm(Layer):
        @node
        class Config(Layer.Config["RMSNorm"]):
            dim: int = interface()          # the parent offers it to build()
            eps: float = setting(default=1e-6, gt=0)

        def __init__(self, cfg: Config, *, rngs): ...

    layer = RMSNorm.Config(eps=1e-5).build(dim=512, rngs=rngs)

A node is a value: frozen, hashable, comparable, picklable. Whoever builds a child offers it the interface dimensions;
the child takes those that it declares, as `interface()` fields of its config or as arguments of its constructor.

A field may say what it changes: `setting(default=None, kind="execution")`. See `axlearn_core.config.kinds`.
"""

import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform

import attrs

from axlearn_core.config.roles import missing_fields
from axlearn_core.config.types import Mismatch, check_type, show
from axlearn_core.errors import ConfigError, Problem


class Required(enum.Enum):
    """The type of `REQUIRED`; an enum member keeps its identity through pickling."""

    REQUIRED = "REQUIRED"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Required.REQUIRED
"""The value of a field that has to be set before anything is built."""

C = TypeVar("C")
T_co = TypeVar("T_co", covariant=True)

Kind = Literal["execution", "microbatches", "duration", "training", "precision", "mathematics"]
"""What a field changes; see the table in `axlearn_core.config.kinds`."""

_INTERFACE, _BOUNDS, _KIND, _HIDDEN = "axlearn_interface", "axlearn_bounds", "axlearn_kind", "axlearn_hidden"
_ASSET = "axlearn_asset"
_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", lambda a, b: a >= b),
    "gt": ("more than", lambda a, b: a > b),
    "le": ("at most", lambda a, b: a <= b),
    "lt": ("less than", lambda a, b: a < b),
}


def setting(
    *,
    default: object,
    kind: Kind | None = None,
    hide_default: bool = False,
    asset: bool = False,
    siblings: tuple[str, ...] = (),
    ge: object = None,
    gt: object = None,
    le: object = None,
    lt: object = None,
) -> Any:
    """A field with bounds, checked wherever its value is a number, and a mark of what it changes.

    Args:
        default: its value where nobody sets it.
        kind: holds for everything below the field that has no mark of its own. None takes the kind of the slot that
            the node stands in; the kind of a root is `mathematics`.
        hide_default: leaves the field out of files, hashes and differences while it is at its default, so that a field
            that a class gains later changes nothing about the configs written before.
        asset: the value is the path of a file that every run keeps a copy of; see `axlearn_core.config.assets`. The field
            is a `str | None`.
        siblings: names of files beside an asset. Runs copy those that exist.
        ge, gt, le, lt: bounds.

    Raises:
        TypeError: `siblings` without `asset`.
    """
    if siblings and not asset:
        raise TypeError("siblings lie beside an asset: set asset=True too")
    bounds = {k: v for k, v in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if v is not None}
    metadata = {_BOUNDS: bounds, _KIND: kind, _HIDDEN: hide_default, _ASSET: siblings if asset else None}
    return attrs.field(default=default, metadata=metadata)


def interface(*, default: object = REQUIRED) -> Any:
    """A field that the parent offers at `build`; users never set it, and it is never reported as missing."""
    return attrs.field(default=default, metadata={_INTERFACE: True})


@dataclass_transform(
    kw_only_default=True, frozen_default=True, eq_default=True, field_specifiers=(attrs.field, setting, interface)
)
def node(cls: type[C]) -> type[C]:
    """Makes a config class: frozen, slotted, keyword-only, hashed once.

    Raises:
        TypeError: a field has no default (use `REQUIRED`) or has a name that every node needs for itself, or a role of
            the class promises a field that it lacks.
    """
    frozen_cls = attrs.frozen(kw_only=True, slots=True, cache_hash=True)(cls)
    for attribute in attrs.fields(frozen_cls):
        if attribute.default is attrs.NOTHING:
            raise TypeError(f"{cls.__qualname__}.{attribute.name} has no default: give it one, or `= REQUIRED`")
        if attribute.name in RESERVED:
            raise TypeError(f"{cls.__qualname__}: no field can be called {attribute.name!r}; every node uses that name")
    if lacking := missing_fields(frozen_cls, {attribute.name for attribute in attrs.fields(frozen_cls)}):
        raise TypeError(f"{cls.__qualname__} lacks the field {lacking[0]}: declare it, or leave the role out")
    return frozen_cls


RESERVED = frozenset({"type", "build", "owner", "validate", "computes_like"})


@attrs.frozen(kw_only=True, slots=True, cache_hash=True)
class Node(Generic[T_co]):
    """The base of all config nodes; `T_co` is what `build` returns."""

    owner: ClassVar[Any] = None
    __configured__: ClassVar[bool] = False
    """Whether `configure` made this class."""
    __interface__: ClassVar[tuple[str, ...]] = ()
    """The parameters that `configure` was told to leave to the parent."""
    computes_like: ClassVar[Any] = None
    """The config class that this one computes the same as, with the fields that it adds at their defaults. Subclasses do
    not inherit it."""

    def __attrs_post_init__(self) -> None:
        """Brings every field into canonical form; raises `ConfigError` with all that do not fit."""
        problems = []
        hints = hints_of(type(self))
        for attribute, value in zip(attrs.fields(type(self)), fields_of(self).values(), strict=True):
            if value is REQUIRED:
                continue
            try:
                canonical = check_type(value, hints[attribute.name], is_node)
            except Mismatch as error:
                path = ".".join((attribute.name, *error.at))
                problems.append(
                    Problem(
                        path=path,
                        message=f"wrong type for {type(self).__qualname__}",
                        got=show(error.got),
                        expected=error.expected,
                    )
                )
                continue
            if canonical is not value:
                object.__setattr__(self, attribute.name, canonical)
            problems += _bound_problems(self, attribute, canonical)
        if problems:
            raise ConfigError(problems)

    def validate(self) -> Iterable[Problem]:
        """Problems between the fields of this node, with paths relative to it; called once everything is set."""
        return ()

    def build(self, **offered: Any) -> T_co:
        """Builds the owner. It takes what it declares of `offered`; the rest is for siblings that declare more.

        Raises:
            ConfigError: a field is still `REQUIRED`, or the owner needs what is not offered.
        """
        config, rest = take(self, offered)
        owner = type(self).owner
        if owner is None:
            raise TypeError(f"{type(self).__qualname__} belongs to no class that could be built")
        if lacking := sorted(required_arguments(owner.__init__, 2) - rest.keys()):
            raise ConfigError(
                Problem(
                    path=name,
                    message=f"{type(self).__qualname__} takes {name!r} from its parent, which does not offer it",
                    got=f"offered: {', '.join(sorted(offered)) or 'nothing'}",
                    fix="put it in a place that offers it, or give the argument a default",
                )
                for name in lacking
            )
        return owner(config, **accepted(owner.__init__, rest))


def fields_of(value: object) -> dict[str, Any]:
    """Name -> value of each field of a node, or of another object of attrs."""
    return {a.name: getattr(value, a.name) for a in attrs.fields(type(value))}


def options_of(value: object, *names: str) -> dict[str, Any]:
    """Name -> value of those fields that are set, which means not None; all fields if no names are given."""
    return {k: v for k, v in fields_of(value).items() if v is not None and (not names or k in names)}


def take(cfg: object, offered: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`cfg` with its interface fields filled from `offered`, and what of `offered` they did not use."""
    interface = {n: offered[n] for n in interface_fields(type(cfg)) if n in offered}
    config = attrs.evolve(cfg, **interface) if interface else cfg
    missing = [name for name, value in fields_of(config).items() if value is REQUIRED]
    if missing:
        raise ConfigError(
            Problem(
                path=name,
                message=f"{type(cfg).__qualname__} needs a value",
                fix="the parent must offer it to build()" if name in interface_fields(type(cfg)) else "set it",
            )
            for name in missing
        )
    return config, {k: v for k, v in offered.items() if k not in interface}


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """What of `offered` the function's signature takes."""
    names, everything = _parameters(function)
    return offered if everything else {k: v for k, v in offered.items() if k in names}


@functools.lru_cache(maxsize=4096)
def required_arguments(function: Callable[..., Any], skip: int = 0) -> frozenset[str]:
    """The arguments without a default that a function takes by name, but for the first `skip` of its parameters."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(p.name for p in parameters if p.kind in kinds and p.default is p.empty)


@functools.lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = parameters_of(function)
    return (
        frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of a call. Of a class whose metaclass hides them (`flax.nnx.Module`), those of its constructor.

    Raises:
        ValueError: the function has no signature.
    """
    parameters = tuple(inspect.signature(function).parameters.values())
    hidden = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if isinstance(function, type) and hidden and function.__init__ is not object.__init__:
        parameters = tuple(inspect.signature(function.__init__).parameters.values())[1:]
    return parameters


def is_node(kind: object) -> bool:
    """Whether `kind` is a config class."""
    return isinstance(kind, type) and issubclass(kind, Node)


def is_interface(attribute: Any) -> bool:
    """Whether the attrs attribute is an `interface()` field."""
    return bool(attribute.metadata.get(_INTERFACE))


def marked_kind(attribute: Any) -> Kind | None:
    """The kind in the attrs attribute's `setting()`."""
    return attribute.metadata.get(_KIND)


def hidden_defaults(value: object) -> frozenset[str]:
    """The names of a node's fields that are at a default which `setting(hide_default=True)` leaves out."""
    return frozenset(name for name, default in _hidden_fields(type(value)) if getattr(value, name) == default)


@functools.lru_cache(maxsize=4096)
def _hidden_fields(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default) for a in attrs.fields(cls) if a.metadata.get(_HIDDEN))


@functools.lru_cache(maxsize=4096)
def asset_fields(cls: type) -> Mapping[str, tuple[str, ...]]:
    """The names of the fields that `setting(asset=True)` marks, each with its siblings."""
    marks = {a.name: a.metadata.get(_ASSET) for a in attrs.fields(cls)}
    return {name: siblings for name, siblings in marks.items() if siblings is not None}


@functools.lru_cache(maxsize=4096)
def interface_fields(cls: type) -> frozenset[str]:
    """The names of the fields that the parent offers."""
    return frozenset(a.name for a in attrs.fields(cls) if is_interface(a))


@functools.lru_cache(maxsize=4096)
def hints_of(cls: type) -> dict[str, Any]:
    """The resolved annotation of each field."""
    annotations = {a.name: a.type for a in attrs.fields(cls)}
    if not any(isinstance(t, str) for t in annotations.values()) and is_node(cls) and cls.__configured__:
        return annotations
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__}: an annotation cannot be resolved ({error}); "
            "define or import the name at module level, outside `if TYPE_CHECKING`"
        ) from error
    return {name: hints.get(name, Any) for name in annotations}


def _bound_problems(owner: object, attribute: Any, value: object) -> Iterable[Problem]:
    bounds = attribute.metadata.get(_BOUNDS) or {}
    if not bounds or isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not all(_OPERATORS[k][1](value, b) for k, b in bounds.items()):
        expected = " and ".join(f"{_OPERATORS[k][0]} {b}" for k, b in bounds.items())
        yield Problem(
            path=attribute.name,
            message=f"out of range for {type(owner).__qualname__}",
            got=show(value),
            expected=expected,
        )


class Configurable:
    """A class with a `Config` node. A subclass without its own gets one derived for it.

    So `isinstance(cfg, Sub.Config)` is exact, and the class that a config builds is always the one that it names.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("Config")
        if own is None:
            base: Any = cls.Config  # type: ignore[attr-defined]  # from the nearest base; see below
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config", "__doc__": None}
            generic = getattr(base, "__parameters__", ())  # stays generic, so that subclasses can still name themselves
            own = node(
                types.new_class("Config", (base[generic] if generic else base,), exec_body=lambda ns: ns.update(names))
            )
            cls.Config = own  # type: ignore[misc]
        elif "__attrs_attrs__" not in vars(own):
            raise TypeError(f"{cls.__qualname__}.Config lacks @node")
        elif not issubclass(own, Node):
            raise TypeError(f"{cls.__qualname__}.Config does not derive from Node or from a base class's Config")
        own.owner = cls

    @node
    class Config(Node[T_co]):
        """The fields of the class; empty here."""


Configurable.Config.owner = Configurable
