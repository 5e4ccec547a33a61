"""A mesh gives the same loss and gradients as one device."""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import jax

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.compose.program import find_layout_problem
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely, check_single, precise_config
from axlearn_plugins_verify.prove.training_step import Step, compare_steps


class Meshes:
    """Compares a step on several devices to one on a single device, for meshes that together cover every axis."""

    summary: ClassVar[str] = "a mesh gives the loss and the gradients of one device"

    def skip_reason(self, case: Any) -> str | None:
        """Skip configs that do not fit any mesh of the local devices, and a given mesh that the small config does not fit."""
        if not case.meshes:
            return "no mesh of several devices divides the parameters and the batch"
        return next(filter(None, (_layout_problem(case.config, shape) for shape in case.meshes)), None)

    def check(self, case: Any) -> Outcome:
        """Compare each mesh. Return the first failure, or the outcome with the largest error.

        A 16-bit dtype is checked on the first mesh only, because compiling takes most of the time.
        """
        outcomes = []
        for index, shape in enumerate(case.meshes):
            check = functools.partial(self._check, case, shape)
            if index == 0:
                outcome = check_precisely(case, check)
            else:
                precise = precise_config(case.config)
                outcome = check_single(case, precise, check, stops_early=precise is not case.config)
            if not outcome.holds:
                return outcome
            outcomes.append(outcome)
        return max(outcomes, key=lambda outcome: outcome.error / outcome.tolerance)

    def _check(self, case: Any, shape: Mapping[str, int], config: Any) -> Outcome:
        alone, spread = case.program(config), case.program(config, shape)
        weights, batch = case.weights(config), case.batch(case.seed)
        axes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
        return compare_steps(
            Step(program=alone, weights=weights, batch=batch),
            Step(program=spread, weights=place(weights, spread), batch=batch),
            compared=f"loss and gradients on {spread.layout.mesh.size} devices ({axes}) and on one",
        )


def place(weights: ModelWeights, program: Program) -> ModelWeights:
    """Shard weights as a program does."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), weights, program.trained_spec)


def _layout_problem(config: Any, shape: Mapping[str, int]) -> str | None:
    """Return why a small config cannot use a mesh, or None if it can."""
    problem = find_layout_problem(config, attrs.evolve(config.mesh, shape=dict(shape)), math.prod(shape.values()))
    axes = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    return problem and f"the small config cannot use the mesh {axes}: {problem}"
