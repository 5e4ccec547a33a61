"""Where activations live: constraints by logical axis names, resolved by the mesh rules in force.

A layer says `constrain(x, "batch", "sequence", "activation_embed")`; whoever traces the model sets the mesh and the
rules. Without them, or on one device, nothing is added to the program.
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
    """The mesh and the rules that a model is traced under."""

    mesh: jax.sharding.Mesh
    rules: Rules

    def spec(self, shape: Sequence[int], axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an activation by its logical axes. A mesh axis serves the first dimension that asks for it; a
        dimension that its mesh axes do not divide stays whole.
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


_in_force: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("axlearn_logical_rules", default=None)


@contextlib.contextmanager
def logical_rules(mesh: jax.sharding.Mesh, rules: Rules) -> Iterator[None]:
    """Within it, `constrain` places activations on `mesh` by `rules` (logical axis -> mesh axes)."""
    token = _in_force.set(Placement(mesh, rules) if mesh.size > 1 else None)
    try:
        yield
    finally:
        _in_force.reset(token)


def placement() -> Placement | None:
    """What the model is being traced under; None on one device."""
    return _in_force.get()


def is_sharded() -> bool:
    """Whether the model is being traced for more than one device."""
    return _in_force.get() is not None


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, laid out by one logical axis name per dimension; None leaves a dimension whole.

    A dimension that its mesh axes do not divide stays whole: unlike the layout of parameters this is no promise, it only
    tells the compiler what to prefer.
    """
    placement = _in_force.get()
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, placement.spec(x.shape, axes)))
