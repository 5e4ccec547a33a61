"""Roles: how a node says what others may set on it."""

from typing import Any, ClassVar


class Role:
    """The base of roles. A config class inherits a role, and features find its nodes by that.

        class WindowRole(Role, fields=("window",)):
            __slots__ = ()

        class Config(Layer.Config["LocalAttention"], WindowRole):
            window: int | None = None

    A role has no fields of its own: each node declares those that the role promises, with its own types and defaults.
    """

    __slots__ = ()

    promised_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that every node with the role has."""

    def __init_subclass__(cls, *, fields: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if fields:
            cls.promised_fields = fields


class StackRole(Role, fields=("mode", "remat")):
    """A stack of layers: `mode` is `scan` or `unrolled`, and `remat` says what the backward pass recomputes of a layer."""

    __slots__ = ()


def states_role(node: object, role: type[Role]) -> bool:
    """Whether the class of a node names a role itself, among its own bases.

    For a role that says how a class computes. `isinstance` would also take a subclass, which may compute something else.
    """
    return role in type(node).__bases__


def missing_fields(cls: type, names: set[str]) -> list[str]:
    """Describes each field that a role of `cls` promises and that is not among `names`."""
    roles = [base for base in cls.__mro__ if issubclass(base, Role) and "promised_fields" in vars(base)]
    return [
        f"{name!r} of the role {role.__name__}" for role in roles for name in role.promised_fields if name not in names
    ]
