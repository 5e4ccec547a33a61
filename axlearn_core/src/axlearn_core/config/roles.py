"""Roles: mark config classes so that features can find them and set their fields."""

from typing import Any, ClassVar


class Role:
    """Base class for roles. A config class inherits a role, and features look for nodes that have it.

        class WindowRole(Role, fields=("window",)):
            __slots__ = ()

        class Config(Layer.Config["LocalAttention"], WindowRole):
            window: int | None = None

    A role defines no fields. Each node declares the fields that the role promises and chooses their types and defaults.
    """

    __slots__ = ()

    promised_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that every node with this role must have."""

    def __init_subclass__(cls, *, fields: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if fields:
            cls.promised_fields = fields


class StackRole(Role, fields=("mode", "remat")):
    """A stack of layers: `mode` is `scan` or `unrolled`, and `remat` selects what the backward pass recomputes in a layer."""

    __slots__ = ()


class FullPrecisionRole(Role, fields=("param_dtype",)):
    """A layer that computes with its parameters as they are stored, and does not round them to the model's compute dtype.

    Features that store parameters in a narrower dtype leave these layers alone.
    """

    __slots__ = ()


class CompetingTokensRole(Role):
    """A part in which the tokens of a row compete, for example for the capacity of an expert.

    The result for a token depends on later tokens of its row and on other documents in the row, even if attention hides them from
    the token. It does not depend on padding.
    """

    __slots__ = ()


def states_role(node: object, role: type[Role]) -> bool:
    """Return True if the class of a node lists a role among its direct bases.

    Use it for roles that describe how a class computes. `isinstance` would also accept a subclass, which may compute
    something else.
    """
    return role in type(node).__bases__


def missing_fields(cls: type, names: set[str]) -> list[str]:
    """Describe each field that a role of `cls` promises but `names` lacks."""
    roles = [base for base in cls.__mro__ if issubclass(base, Role) and "promised_fields" in vars(base)]
    return [
        f"{name!r} of the role {role.__name__}" for role in roles for name in role.promised_fields if name not in names
    ]
