"""Shard activations by logical axis names, which mesh rules resolve.

A layer calls `constrain(x, "batch", "sequence", "activation_embed")`. The program that traces the model sets the mesh and
the rules. Without them, or on one device, constraints have no effect.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import jax
from jax.sharding import NamedSharding, PartitionSpec

Rules = Mapping[str, Sequence[str]]


@attrs.frozen(eq=False)
class Placement:
    """Mesh and rules for tracing a model."""

    mesh: jax.sharding.Mesh
    rules: Rules

    def spec(self, shape: Sequence[int], axes: Sequence[str | None]) -> PartitionSpec:
        """Return the partition spec for an activation, given its logical axes.

        A mesh axis shards the first dimension that requests it. A dimension is not sharded if its size is not divisible by its mesh
        axes.
        """
        used: set[str] = set()
        parts: list[tuple[str, ...] | None] = []
        for size, axis in zip(shape, axes, strict=True):
            candidates = self.rules.get(axis, ()) if axis is not None else ()
            mesh_axes = tuple(a for a in candidates if a not in used and self.mesh.shape[a] > 1)
            if not mesh_axes or size % math.prod(self.mesh.shape[a] for a in mesh_axes):
                parts.append(None)
                continue
            used.update(mesh_axes)
            parts.append(mesh_axes)
        return PartitionSpec(*parts)


_active: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("axlearn_logical_rules", default=None)


@contextlib.contextmanager
def logical_rules(mesh: jax.sharding.Mesh, rules: Rules) -> Iterator[None]:
    """Use a mesh and rules (logical axis -> mesh axes) for `constrain` inside this context."""
    token = _active.set(Placement(mesh, rules) if mesh.size > 1 else None)
    try:
        yield
    finally:
        _active.reset(token)


def placement() -> Placement | None:
    """Return the active mesh and rules, or None on one device."""
    return _active.get()


def is_sharded() -> bool:
    """Return True if the model is traced for more than one device."""
    return _active.get() is not None


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of `x`, given a logical axis name per dimension. None leaves a dimension unsharded.

    This is a hint to the compiler. Unlike a parameter's dimension, a dimension of `x` is left unsharded if it is not divisible by
    its mesh axes.
    """
    placement = _active.get()
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, placement.spec(x.shape, axes)))
