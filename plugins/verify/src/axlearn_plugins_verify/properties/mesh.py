"""A mesh gives the loss and the gradients of one device."""

import math
from typing import Any, ClassVar

import jax

from axlearn_core.contracts.experiment import get_mesh
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.step import Step, compare_steps


class MeshEquality:
    """Compares a step on the mesh of the config to one on a single device."""

    summary: ClassVar[str] = "the mesh gives the loss and the gradients of one device"

    def skip_reason(self, case: Any) -> str | None:
        """Skip meshes of one device."""
        if (count := _size(case.config)) < 2:
            return "the mesh has one device"
        return None if count <= jax.device_count() else f"the mesh needs {count} devices"

    def check(self, case: Any) -> Outcome:
        """Compare the mesh to one device."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, config: Any) -> Outcome:
        one, other = (
            Step(program=case.program(config, devices), weights=case.weights(config), batch=case.batch(case.seed))
            for devices in (1, _size(config))
        )
        shape = ", ".join(f"{axis}={size}" for axis, size in config.mesh.shape.items() if size > 1)
        return compare_steps(one, other, compared=f"{shape} and one device")


def _size(config: Any) -> int:
    mesh = get_mesh(config)
    return 1 if mesh is None else math.prod(mesh.shape.values())
