"""Roles of nodes that several distributions build and set."""

from axlearn_core.config.roles import Role


class StackRole(Role, fields=("mode", "remat")):
    """A stack of layers: `mode` is `scan` or `unrolled`, and `remat` says what the backward pass recomputes of a layer."""

    __slots__ = ()
