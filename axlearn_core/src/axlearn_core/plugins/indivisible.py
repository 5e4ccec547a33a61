"""The mesh of a config whose parameters cannot be split over all devices, and which asks for no other mesh."""

import types
from collections.abc import Mapping
from typing import Any

import attrs

from axlearn_core.config import Node, check
from axlearn_core.contracts.mesh import Mesh, MeshRule, sizes_on
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import load


@attrs.frozen
class Replacement:
    """A mesh shape in place of the default one.

    Attributes:
        shape: mesh axis -> size.
        reason: what changes, and why.
    """

    shape: Mapping[str, int]
    reason: str


def replace_shape(tree: Node[Any], rule: MeshRule, machine: Machine) -> Replacement | None:
    """The shape that a rule has for such a config; None if the config has a mesh, is wrong, or fits the default mesh."""
    mesh = getattr(tree, "mesh", None)
    if not isinstance(mesh, Mesh) or mesh.shape or machine.devices == 1:
        return None
    try:
        check(tree)
    except RequestError:
        return None  # reported with all else that is wrong
    # This imports JAX, which several devices need anyway.
    refusal: Any = load("axlearn_core.compose.program:refusal_of_layout")
    parts = types.SimpleNamespace(**{name: getattr(tree, name, None) for name in ("model", "objective", "input")})
    refused = refusal(parts, mesh, machine.devices)
    shape = sizes_on(machine, rule.indivisible)
    if refused is None or refusal(parts, attrs.evolve(mesh, shape=shape), machine.devices) is not None:
        return None
    sizes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    return Replacement(
        shape, f"{sizes}: every device holds all weights, since the default mesh cannot split them: {refused}"
    )
