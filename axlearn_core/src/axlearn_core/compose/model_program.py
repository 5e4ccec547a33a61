"""Programs of a model without an experiment, for notebooks, tests, and servers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from axlearn_core.compose.compiler import Compiler
from axlearn_core.compose.functional import Functional, ModelWeights
from axlearn_core.compose.functions import Function, Part, convert_functions, model_functions
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.compose.program import Program, array_shardings, sharded_specs
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.manager import host


class ModelProgram(Compiler):
    """Compiles the functions that a model and a plugin declare.

    Attributes:
        functional: The model as pure functions.
    """

    def __init__(
        self,
        functional: Functional,
        devices: Sequence[Any],
        mesh: Mesh | None = None,
        target: Target | None = None,
        declare: Callable[[Any], Mapping[str, Function]] | None = None,
    ):
        """Create the program.

        Args:
            functional: The model.
            devices: Devices to compile for.
            mesh: Mesh config (default: `Mesh()`).
            target: Hardware of the devices (default: looked up by device kind).
            declare: Returns additional functions for the model with abstract arrays. They override the model's functions.
        """
        self.functional = functional
        mesh = mesh or Mesh()
        layout = Layout(make_mesh(mesh, devices), mesh)
        specs = sharded_specs(functional, array_shardings(functional, layout))
        functions = model_functions(functional)
        if declare is not None:
            functions |= convert_functions(declare(functional.describe()), functional)
        target = target or host().target(devices[0].device_kind)
        super().__init__(functions, layout, mesh, target, {Part.WEIGHTS: specs})

    def place(self, weights: ModelWeights) -> ModelWeights:
        """Transfer weights to this program's devices."""
        return jax.device_put(weights, jax.tree.map(lambda spec: spec.sharding, self.parts[Part.WEIGHTS]))


def model_program(model: object) -> tuple[ModelProgram, ModelWeights]:
    """Return a program for a model, and the model's weights. Models with the same structure share a program."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    program = _program(graph, tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), _Structure(model))
    return program, program.place(program.functional.extract_weights(model))


def with_program(model: object, program: Program | ModelProgram | None) -> tuple[Program | ModelProgram, ModelWeights]:
    """Return `program` (if None, a new program for the model) and the model's weights."""
    return model_program(model) if program is None else (program, program.functional.extract_weights(model))


class _Structure:
    """Wraps a model to keep it out of the cache key."""

    def __init__(self, model: object):
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=16)
def _program(graph: object, tree: object, shapes: object, structure: _Structure) -> ModelProgram:
    return ModelProgram(Functional.from_module(structure.model), jax.local_devices()[:1])
