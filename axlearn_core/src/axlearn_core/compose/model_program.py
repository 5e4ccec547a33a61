"""The functions of a model that stands alone: outside of an experiment, in a notebook or a test."""

import functools
from typing import Any

import jax
from flax import nnx

from axlearn_core.compose.compiler import Compiler
from axlearn_core.compose.functional import Functional, ModelWeights
from axlearn_core.compose.functions import Part, model_functions
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.compose.program import Program, array_shardings, sharded_specs
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.plugins.manager import host


class ModelProgram(Compiler):
    """The functions that a model declares, for one device.

    Attributes:
        functional: the model as pure functions.
    """

    def __init__(self, functional: Functional, device: Any):
        self.functional = functional
        mesh = Mesh()
        layout = Layout(make_mesh(mesh, [device]), mesh)
        specs = sharded_specs(functional, array_shardings(functional, layout))
        target = host().target(device.device_kind)
        super().__init__(model_functions(functional), layout, mesh, target, {Part.WEIGHTS: specs})

    def place(self, weights: ModelWeights) -> ModelWeights:
        """Weights on this program's device."""
        return jax.device_put(weights, jax.tree.map(lambda spec: spec.sharding, self.parts[Part.WEIGHTS]))


def model_program(model: Any) -> tuple[ModelProgram, ModelWeights]:
    """A program for a model, and the model's weights as it takes them. Models of one structure share their program."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    program = _program(graph, tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), _Structure(model))
    return program, program.place(program.functional.weights_of(model))


def with_program(model: Any, program: Program | ModelProgram | None) -> tuple[Program | ModelProgram, ModelWeights]:
    """A program that computes with a model, and the model's weights: `program`, or one for the model alone."""
    return model_program(model) if program is None else (program, program.functional.weights_of(model))


class _Structure:
    """A model that plays no part in a comparison: what tells programs apart is given beside it."""

    def __init__(self, model: Any):
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=16)
def _program(graph: Any, tree: Any, shapes: Any, structure: _Structure) -> ModelProgram:
    return ModelProgram(Functional.of_module(structure.model), jax.local_devices()[0])
