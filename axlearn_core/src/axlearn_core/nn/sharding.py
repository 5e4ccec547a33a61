"""Where activations live: constraints by logical axis names, resolved by the mesh rules in force.

A layer says `constrain(x, "batch", "sequence", "activation_embed")`; whoever traces the model sets the mesh and the
rules. Without them, or on one device, nothing is added to the program.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
from jax.sharding import NamedSharding, PartitionSpec

Rules = Mapping[str, Sequence[str]]
Axes = Sequence[str | None] | None


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
            wanted = self.rules.get(axis, ()) if axis is not None else ()
            mesh_axes = tuple(a for a in wanted if a not in used and self.mesh.shape[a] > 1)
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
    found = _in_force.get()
    if found is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(found.mesh, found.spec(x.shape, axes)))


def per_device(
    function: Callable[..., Any], operands: Sequence[Axes], result: Sequence[str | None]
) -> Callable[..., Any]:
    """`function` run by every device on its own part of the operands: for kernels, which the compiler cannot partition.

    Args:
        function: of arrays (or None), to one array.
        operands: the logical axes of each operand; None for an operand that is None.
        result: the logical axes of the result, whose dimensions are split as those of the operands with the same names.
    """
    found = _in_force.get()
    if found is None:
        return function

    def run(*args: jax.Array | None) -> Any:
        specs = tuple(
            PartitionSpec() if x is None else found.spec(x.shape, a or ()) for x, a in zip(args, operands, strict=True)
        )
        split: dict[str, Any] = {}
        for axes, spec in zip(operands, specs, strict=True):
            for name, part in zip(axes or (), spec, strict=False):
                if name is not None:
                    split.setdefault(name, part)
        made = PartitionSpec(*(split.get(name or "") for name in result))
        return jax.shard_map(function, mesh=found.mesh, in_specs=specs, out_specs=made, check_vma=False)(*args)

    return run
