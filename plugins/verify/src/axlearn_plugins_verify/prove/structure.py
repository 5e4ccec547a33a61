"""The structure of a config: what a smaller config must keep."""

import re
from collections.abc import Iterator
from typing import Any

import attrs
import jax
from flax import nnx

from axlearn_core.compose import ModelAndObjective
from axlearn_core.compose.flops import inner_jaxprs
from axlearn_core.compose.program import check_program
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.contracts.experiment import get_input_config
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import Selection

CONTROL_FLOW = frozenset({"scan", "while", "cond", "shard_map", "checkpoint", "remat2", "pallas_call"})
"""Primitives whose body counts as a separate place."""
DEPENDS_ON_SIZES = frozenset(
    """
    add and broadcast_in_dim clamp concatenate convert_element_type copy copy_p custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr div dynamic_slice dynamic_update_slice eq floor ge gt integer_pow iota jit le lt max min mul ne neg
    not optimization_barrier or pad pjit reduce_max reduce_sum rem reshape rev round select_n sharding_constraint sign slice
    split square squeeze stop_gradient sub transpose
    """.split()  # noqa: SIM905
)
"""Primitives that move or combine elements. A program may need them for some sizes and not for others."""


@attrs.frozen
class Structure:
    """The modules, arrays and operations of a config, without their sizes.

    Attributes:
        parts: Class and path of each module, and path, dtype and number of dimensions of each array. Paths have no indices.
        operations: Primitives of the loss, each with the control flow around it, such as `scan/dot_general`.
        parameters: Number of parameters, which two configs with the same structure need not share.
    """

    parts: frozenset[tuple[str, ...]]
    operations: frozenset[str]
    parameters: int = attrs.field(eq=False)

    def lost_operations(self, smaller: "Structure") -> frozenset[str]:
        """Return the operations that a smaller config does not have."""
        return self.operations - smaller.operations


def describe_structure(config: Any) -> Structure:
    """Return the structure of a `Trainer.Config`, with references instead of kernels.

    Raises:
        ConfigError: If the config is invalid.
    """
    trained = check_program(attrs.evolve(config, mesh=attrs.evolve(config.mesh, shape={"fsdp": 1})))
    models = [trained.model.describe()] + ([] if trained.objective is None else [trained.objective.describe()])
    modules = {
        (str(number), _without_indices(".".join(map(str, path))), type(module).__qualname__)
        for number, model in enumerate(models)
        for path, module in nnx.iter_modules(model)
    }
    arrays = {
        (_without_indices(path), str(spec.dtype), str(len(spec.shape)))
        for path, spec in {**trained.abstract, **trained.variables}.items()
    }
    parameters = sum(spec.size for spec in trained.abstract.values())
    return Structure(frozenset(modules | arrays), frozenset(_operations(_trace_loss(config, trained))), parameters)


def _without_indices(path: str) -> str:
    return re.sub(r"\b\d+\b", "#", path)


def _trace_loss(config: Any, trained: ModelAndObjective) -> Any:
    references = Selection(platform="cpu", declared=lambda op: [selection.reference(op)], required=())
    with selection.use(references):
        return jax.make_jaxpr(config.functions(trained.model)["loss"].call)(trained.specs, abstract_batch(config)).jaxpr


def abstract_batch(config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the batch shapes that the config's input declares, or an empty dict if it declares none."""
    source = get_input_config(config)
    shapes = source.batch_shapes() if isinstance(source, DeclaresBatches) else {}
    return {name: jax.ShapeDtypeStruct(*spec) for name, spec in shapes.items()}


def _operations(jaxpr: Any, place: str = "") -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in DEPENDS_ON_SIZES:
            yield place + name
        for inner in inner_jaxprs(equation):
            yield from _operations(inner, f"{place}{name}/" if name in CONTROL_FLOW else place)
