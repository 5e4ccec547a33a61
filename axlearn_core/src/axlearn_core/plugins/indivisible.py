"""The mesh of a config whose parameters cannot be split over all devices, and which asks for no other mesh."""

import types
from collections.abc import Mapping
from typing import Any

import attrs

from axlearn_core.config import Node, check
from axlearn_core.contracts.experiment import input_of, mesh_of, model_of, objective_of
from axlearn_core.contracts.mesh import MeshRule, sizes_on
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
    mesh = mesh_of(tree)
    if mesh is None or mesh.shape or machine.devices == 1:
        return None
    try:
        check(tree)
    except RequestError:
        return None  # reported with all else that is wrong
    # This imports JAX, which several devices need anyway.
    refusal: Any = load("axlearn_core.compose.program:refusal_of_layout")
    parts = types.SimpleNamespace(model=model_of(tree), objective=objective_of(tree), input=input_of(tree))
    refused = refusal(parts, mesh, machine.devices)
    shape = sizes_on(machine, rule.indivisible)
    if refused is None or refusal(parts, attrs.evolve(mesh, shape=shape), machine.devices) is not None:
        return None
    sizes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    return Replacement(
        shape, f"{sizes}: every device holds all weights, since the default mesh cannot split them: {refused}"
    )
