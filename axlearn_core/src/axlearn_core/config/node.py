"""Config nodes: frozen attrs classes linked to the class that they configure.

    class RMSNorm(Layer):
        @node
        class Config(Layer.Config["RMSNorm"]):
            dim: int = interface()          # the parent offers it to build()
            eps: float = setting(default=1e-6, gt=0)

        def __init__(self, cfg: Config, *, rngs): ...

    layer = RMSNorm.Config(eps=1e-5).build(dim=512, rngs=rngs)

A node is a value: frozen, hashable, comparable, and picklable. When a parent builds a child, it offers dimensions. The child
receives those that it declares, either as `interface()` fields of its config or as arguments of its constructor.

A field can declare what it affects: `setting(default=None, kind="execution")`. See `axlearn_core.config.kinds`.
"""

import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform

import attrs

from axlearn_core.config.roles import missing_fields
from axlearn_core.config.types import Mismatch, accepts_all, check_type, show
from axlearn_core.errors import ConfigError, Problem


class Required(enum.Enum):
    """The type of `REQUIRED`; an enum member keeps its identity when it is pickled."""

    REQUIRED = "REQUIRED"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Required.REQUIRED
"""Placeholder for a field that must be set before the config is built."""

C = TypeVar("C")
T_co = TypeVar("T_co", covariant=True)

Kind = Literal["execution", "microbatches", "duration", "training", "precision", "mathematics"]
"""The kind of a field. See the table in `axlearn_core.config.kinds`."""

_INTERFACE, _BOUNDS, _KIND, _HIDDEN = "axlearn_interface", "axlearn_bounds", "axlearn_kind", "axlearn_hidden"
_ASSET, _LABEL = "axlearn_asset", "axlearn_label"
_LABEL_PATTERN = re.compile(r"\w[^/\\\x00-\x1f\x7f]*")
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
    label: bool = False,
    siblings: tuple[str, ...] = (),
    ge: object = None,
    gt: object = None,
    le: object = None,
    lt: object = None,
) -> Any:
    """Declare a config field with optional bounds and a kind.

    Args:
        default: Default value.
        kind: Kind of this field and of every unmarked field below it. If None, the field inherits the kind of the slot
            that contains its node. The root has the kind `mathematics`.
        hide_default: Omit the field from files, hashes, and diffs if it has its default value. Use this to add a field to a
            class without changing existing configs.
        asset: The value is a path to a file, and every run keeps a copy of that file. The field has type `str | None`.
            See `axlearn_core.config.assets`.
        label: The value only names the config. It has no effect, so it is omitted from comparisons, hashes, and diffs. Files
            contain it unless it has its default value. It must be usable as part of a directory name.
        siblings: Names of files in the same folder as the asset. A run copies the ones that exist.
        ge, gt, le, lt: Bounds, checked when the value is a number.

    Raises:
        TypeError: If `siblings` is given without `asset`.
    """
    if siblings and not asset:
        raise TypeError("siblings requires asset=True")
    bounds = {k: v for k, v in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if v is not None}
    metadata = {
        _BOUNDS: bounds,
        _KIND: kind,
        _HIDDEN: hide_default or label,
        _ASSET: siblings if asset else None,
        _LABEL: label,
    }
    return attrs.field(default=default, metadata=metadata, eq=not label)


def interface(*, default: object = REQUIRED) -> Any:
    """Declare a field that the parent passes to `build`. Users cannot set it, and it is never reported as missing."""
    return attrs.field(default=default, metadata={_INTERFACE: True})


@dataclass_transform(
    kw_only_default=True, frozen_default=True, eq_default=True, field_specifiers=(attrs.field, setting, interface)
)
def node(cls: type[C]) -> type[C]:
    """Turn a class into a config class: frozen, slotted, keyword-only, with a cached hash.

    Raises:
        TypeError: If a field has no default (use `REQUIRED`), if its name is reserved, or if the class lacks a field
            that one of its roles promises.
    """
    frozen_cls = attrs.frozen(kw_only=True, slots=True, cache_hash=True, repr=False)(cls)
    for attribute in attrs.fields(frozen_cls):
        if attribute.default is attrs.NOTHING:
            raise TypeError(f"{cls.__qualname__}.{attribute.name} has no default: give it one, or `= REQUIRED`")
        if attribute.name in RESERVED:
            raise TypeError(f"{cls.__qualname__}: the field name {attribute.name!r} is reserved")
    if missing := missing_fields(frozen_cls, {attribute.name for attribute in attrs.fields(frozen_cls)}):
        raise TypeError(f"{cls.__qualname__} lacks the field {missing[0]}: declare the field or remove the role")
    return frozen_cls


RESERVED = frozenset({"type", "build", "owner", "validate", "computes_like", "wraps"})


@attrs.frozen(kw_only=True, slots=True, cache_hash=True, repr=False)
class Node(Generic[T_co]):
    """Base class for all config nodes. `build` returns a `T_co`."""

    owner: ClassVar[Any] = None
    __configured__: ClassVar[bool] = False
    """True if `configure` created this class."""
    __interface__: ClassVar[tuple[str, ...]] = ()
    """Parameters that the parent passes, as given to `configure`."""
    computes_like: ClassVar[Any] = None
    """Config class that computes the same function when this class's extra fields have their defaults. Subclasses do
    not inherit it."""
    wraps: ClassVar[tuple[str, ...]] = ("inner", "base")
    """Names of the fields that contain the node that this one wraps, or a tuple of alternatives. Fields that the class lacks are
    ignored. A path that continues at a wrapper, such as `attention.num_heads`, reaches into the node that it wraps. See
    `axlearn_core.config.wrappers`."""

    def __attrs_post_init__(self) -> None:
        """Convert every field to canonical form. Raise one `ConfigError` that lists every invalid field."""
        problems = []
        cls = type(self)
        for attribute in attrs.fields(cls):
            value = get_field(self, attribute.name)
            if value is REQUIRED:
                continue
            if not _is_canonical(cls, attribute.name, type(value)):
                try:
                    canonical = check_type(value, resolve_hints(cls)[attribute.name], is_node)
                except Mismatch as error:
                    path = ".".join((attribute.name, *error.path))
                    message = f"wrong type for {cls.__qualname__}"
                    problems.append(Problem(path=path, message=message, got=show(error.got), expected=error.expected))
                    continue
                if canonical is not value:
                    object.__setattr__(self, attribute.name, canonical)
                    value = canonical
            if attribute.metadata:
                problems += [*_bound_problems(self, attribute, value), *_label_problems(attribute, value)]
        if problems:
            raise ConfigError(problems)

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults, on one line if they fit. See `axlearn_core.config.display`."""
        from axlearn_core.config.display import show_config

        return show_config(self)

    def _repr_html_(self) -> str:
        """Return all fields as collapsible nested lists, for notebooks."""
        from axlearn_core.config.display import config_html

        return config_html(self)

    def validate(self) -> Iterable[Problem]:
        """Return problems that involve several fields, with paths relative to this node.

        It is called when every required field is set.
        """
        return ()

    def build(self, **offered: Any) -> T_co:
        """Build the owner. The owner receives the arguments in `offered` that it declares and ignores the rest.

        Raises:
            ConfigError: If a field is still `REQUIRED`, or if the owner requires an argument that is not in `offered`.
        """
        config, rest = take(self, offered)
        owner = type(self).owner
        if owner is None:
            raise TypeError(f"{type(self).__qualname__} has no owner class to build")
        if missing := sorted(required_arguments(owner.__init__, 2) - rest.keys()):
            raise ConfigError(
                Problem(
                    path=name,
                    message=f"{type(self).__qualname__} requires {name!r}, which its parent does not offer",
                    got=f"offered: {', '.join(sorted(offered)) or 'nothing'}",
                    fix="use the component in a slot that offers it, or give the argument a default",
                )
                for name in missing
            )
        return owner(config, **accepted(owner.__init__, rest))


def get_fields(value: object) -> dict[str, Any]:
    """Return the fields of a node or other attrs object by name."""
    return {name: get_field(value, name) for name in field_names(type(value))}


def get_field(value: object, name: str) -> Any:
    """Return a field of a node or other attrs object."""
    return getattr(value, name)


@functools.lru_cache(maxsize=4096)
def field_names(cls: type) -> tuple[str, ...]:
    """Return the names of the fields of an attrs class."""
    return tuple(a.name for a in attrs.fields(cls))


def get_options(value: object, *names: str) -> dict[str, Any]:
    """Return the fields that are not None, by name. If `names` are given, return only those fields."""
    return {k: v for k, v in get_fields(value).items() if v is not None and (not names or k in names)}


def take(cfg: object, offered: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Fill the interface fields of `cfg` from `offered`. Return the new config and the unused arguments."""
    interface = {n: offered[n] for n in interface_fields(type(cfg)) if n in offered}
    config = attrs.evolve(cfg, **interface) if interface else cfg
    missing = [name for name, value in get_fields(config).items() if value is REQUIRED]
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
    """Return the arguments in `offered` that the function accepts."""
    names, everything = _parameters(function)
    return offered if everything else {k: v for k, v in offered.items() if k in names}


@functools.lru_cache(maxsize=4096)
def required_arguments(function: Callable[..., Any], skip: int = 0) -> frozenset[str]:
    """Return the names of arguments without a default, ignoring the first `skip` parameters."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(p.name for p in parameters if p.kind in kinds and p.default is p.empty)


@functools.lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = get_parameters(function)
    return (
        frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def get_parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function or class.

    For a class whose metaclass hides its signature (`flax.nnx.Module`), return the parameters of its constructor.

    Raises:
        ValueError: If the function has no signature.
    """
    parameters = tuple(inspect.signature(function).parameters.values())
    hidden = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if isinstance(function, type) and hidden and function.__init__ is not object.__init__:
        parameters = tuple(inspect.signature(function.__init__).parameters.values())[1:]
    return parameters


def is_node(kind: object) -> bool:
    """Return True if `kind` is a config class."""
    return isinstance(kind, type) and issubclass(kind, Node)


def is_interface(attribute: Any) -> bool:
    """Return True if the attrs attribute is an `interface()` field."""
    return bool(attribute.metadata.get(_INTERFACE))


def marked_kind(attribute: Any) -> Kind | None:
    """Return the kind that `setting()` gave to an attrs attribute, or None."""
    return attribute.metadata.get(_KIND)


def hidden_defaults(value: object) -> frozenset[str]:
    """Return the names of `hide_default` fields that have their default value."""
    return frozenset(name for name, default in _hidden_fields(type(value)) if get_field(value, name) == default)


@functools.lru_cache(maxsize=4096)
def _hidden_fields(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default) for a in attrs.fields(cls) if a.metadata.get(_HIDDEN))


@functools.lru_cache(maxsize=4096)
def asset_fields(cls: type) -> Mapping[str, tuple[str, ...]]:
    """Map the name of each asset field to the names of its siblings."""
    marks = {a.name: a.metadata.get(_ASSET) for a in attrs.fields(cls)}
    return {name: siblings for name, siblings in marks.items() if siblings is not None}


@functools.lru_cache(maxsize=4096)
def label_fields(cls: type) -> frozenset[str]:
    """Return the names of the fields that are labels."""
    return frozenset(a.name for a in attrs.fields(cls) if a.metadata.get(_LABEL))


@functools.lru_cache(maxsize=4096)
def interface_fields(cls: type) -> frozenset[str]:
    """Return the names of the `interface()` fields."""
    return frozenset(a.name for a in attrs.fields(cls) if is_interface(a))


@functools.lru_cache(maxsize=4096)
def resolve_hints(cls: type) -> dict[str, Any]:
    """Return the resolved annotation of each field."""
    annotations = {a.name: a.type for a in attrs.fields(cls)}
    if not any(isinstance(t, str) for t in annotations.values()) and is_node(cls) and cls.__configured__:
        return annotations
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__}: an annotation cannot be resolved ({error}); "
            "define or import the name at module level and outside `if TYPE_CHECKING`"
        ) from error
    return {name: hints.get(name, Any) for name in annotations}


@functools.lru_cache(maxsize=65536)
def _is_canonical(cls: type, name: str, kind: type) -> bool:
    """Return True if a value of class `kind` is valid in a field and needs no conversion."""
    return accepts_all(resolve_hints(cls)[name], kind, is_node)


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


def _label_problems(attribute: Any, value: object) -> Iterable[Problem]:
    if attribute.metadata.get(_LABEL) and isinstance(value, str) and value and not _LABEL_PATTERN.fullmatch(value):
        yield Problem(
            path=attribute.name,
            message="cannot be part of a directory name",
            got=show(value),
            expected="a letter or digit first, and no slashes or control characters",
        )


class Configurable:
    """A class with a `Config` node.

    Each subclass that does not define a `Config` gets a derived one. `isinstance(cfg, Sub.Config)` is therefore exact,
    and a config always builds the class that it names.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        config = vars(cls).get("Config")
        if config is None:
            base: Any = cls.Config  # type: ignore[attr-defined]  # inherited from the nearest base
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config", "__doc__": None}
            generic = getattr(base, "__parameters__", ())  # keep it generic for further subclasses
            config = node(
                types.new_class("Config", (base[generic] if generic else base,), exec_body=lambda ns: ns.update(names))
            )
            cls.Config = config  # type: ignore[misc]
        elif "__attrs_attrs__" not in vars(config):
            raise TypeError(f"{cls.__qualname__}.Config lacks @node")
        elif not issubclass(config, Node):
            raise TypeError(f"{cls.__qualname__}.Config does not derive from Node or from a base class's Config")
        config.owner = cls

    @node
    class Config(Node[T_co]):
        """An empty config. Subclasses add their fields."""


Configurable.Config.owner = Configurable
