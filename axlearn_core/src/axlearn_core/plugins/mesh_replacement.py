"""Replace the default mesh if it cannot shard the parameters of a config."""

import types
from collections.abc import Mapping
from typing import Any

import attrs

from axlearn_core.config import Node, check
from axlearn_core.contracts.experiment import get_input_config, get_mesh, get_model_config, get_objective_config
from axlearn_core.contracts.mesh import MeshRule, sizes_on
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import load


@attrs.frozen
class MeshReplacement:
    """A mesh shape that replaces the default shape.

    Attributes:
        shape: Size of each mesh axis.
        reason: Description of the change and its reason.
    """

    shape: Mapping[str, int]
    reason: str


def find_mesh_replacement(tree: Node[Any], rule: MeshRule, machine: Machine) -> MeshReplacement | None:
    """Return the mesh shape from `rule.fallback_shape` if the default mesh cannot shard the parameters.

    Returns:
        The replacement. None if the config has a mesh shape, is invalid, or works with the default mesh, or if the
        replacement would not help.
    """
    mesh = get_mesh(tree)
    if mesh is None or mesh.shape or machine.devices == 1:
        return None
    try:
        check(tree)
    except RequestError:
        return None  # reported later, together with all other problems
    # This imports JAX, which programs for several devices need anyway.
    find_problem: Any = load("axlearn_core.compose.program:find_layout_problem")
    parts = types.SimpleNamespace(
        model=get_model_config(tree), objective=get_objective_config(tree), input=get_input_config(tree)
    )
    problem = find_problem(parts, mesh, machine.devices)
    shape = sizes_on(machine, rule.fallback_shape)
    if problem is None or find_problem(parts, attrs.evolve(mesh, shape=shape), machine.devices) is not None:
        return None
    sizes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    return MeshReplacement(
        shape, f"{sizes}: weights are replicated because the default mesh cannot shard them: {problem}"
    )
