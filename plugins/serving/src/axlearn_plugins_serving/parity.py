"""The mode `parity`: which models it can serve bit for bit, on which devices, and with how many rows at least."""

import math
from collections.abc import Sequence
from typing import Any

from flax import nnx

from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.compose.program import Program
from axlearn_core.config import Node, find
from axlearn_core.config.node import interface_fields
from axlearn_core.errors import RequestError
from axlearn_core.nn.linear import Linear
from axlearn_plugins_serving.contracts import HasConfig
from axlearn_plugins_serving.paged import has_latents
from axlearn_plugins_transformer.attention_variants.alibi import Alibi
from axlearn_plugins_transformer.layer_roles import ExpertsRole

ROWS = 64
"""Of everything but attention in the mode `parity`: XLA for CPU multiplies fewer rows by another algorithm. How many are enough
depends on the inputs: 56 rows for maps of 256 inputs, 40 for 512 and 640, 24 for 768, and 4 for 1,024 and more."""
ROWS_OF_WIDE_MAPS = {1024: 8, 768: 24}
"""The least inputs of a model's maps -> rows that are enough if all its maps are wide (see `has_wide_maps`)."""
WIDE, INPUT_MULTIPLE, OUTPUT_MULTIPLE = 768, 256, 64
"""Maps for which fewer rows are enough: of 11 such numbers of inputs and 14 of outputs none needed more."""


def least_rows(model: Any) -> int:
    """How many rows are computed at least, so that none depends on their number, bit for bit; `model`: a `CausalLM`."""
    if not has_wide_maps(model):
        return ROWS
    least = min(math.prod(m.cfg.input_dims) for m in _maps(model))
    return next(rows for inputs, rows in ROWS_OF_WIDE_MAPS.items() if least >= inputs)


def has_wide_maps(model: Any, devices: int = 1) -> bool:
    """Whether all products of a `CausalLM` are wide (see `WIDE`) where `devices` share their outputs.

    XLA for CPU then computes the same bits for a part of the outputs as for all of them; tested on 2 devices.
    """
    maps = _maps(model)
    inputs = [math.prod(m.cfg.input_dims) for m in maps]
    outputs = [math.prod(m.cfg.output_dims) for m in maps] + [model.vocab_size]  # the head may be the embedding
    multiple = OUTPUT_MULTIPLE * devices
    wide = all(n >= WIDE and n % INPUT_MULTIPLE == 0 for n in inputs) and all(n % multiple == 0 for n in outputs)
    return bool(maps) and wide and all(type(m) is Linear for m in maps)


def _maps(model: Any) -> list[Any]:
    """The projections: what a parent offers `input_dims` and `output_dims` to."""
    modules = [module for _, module in nnx.iter_modules(model) if isinstance(module, HasConfig)]
    built = [module for module in modules if isinstance(module.cfg, Node)]
    return [module for module in built if {"input_dims", "output_dims"} <= interface_fields(type(module.cfg))]


def refusal_of_parity(program: Program | ModelProgram) -> str | None:
    """Why devices cannot share the products of a `ModelProgram` bit for bit; None where they can, or there is one."""
    mesh, model = program.layout.mesh, program.functional.describe()
    if mesh.size == 1:
        return None
    if mesh.size > 2 or mesh.devices.flat[0].platform != "cpu":
        return "two CPU devices were tried, and nothing else"
    if program.mesh.rules:
        return "the rules of its mesh may divide sums"
    if not has_wide_maps(model, mesh.size):
        return "XLA adds up narrow maps in other ways: each needs 768 inputs, a multiple of 256, and multiples of 128 outputs"
    if find(model.cfg, Alibi):
        return "biases of positions were not tried"
    return None


def check_parity(
    model: Any,
    adapters: Sequence[str] = (),
    cache_dtype: str | None = None,
    program: Program | ModelProgram | None = None,
    kernel: str | None = None,
) -> None:
    """Raises `RequestError` where steps of a model cannot be, bit for bit, what its training program computes."""
    if program is not None and (refusal := refusal_of_parity(program)) is not None:
        raise RequestError(
            f"the mode parity cannot serve this model on {program.layout.mesh.size} devices: {refusal}\n"
            "    fix: serving.tensor_parallel=1, or mode=fast, which is within rounding"
        )
    if kernel not in (None, "invariant"):
        raise RequestError(
            f"the mode parity attends by the kernel 'invariant' alone\n    got: serving.runner.kernel={kernel}\n"
            "    fix: leave it out, or mode=fast"
        )
    reasons = []
    if cache_dtype is not None:
        reasons.append(f"with a cache in {cache_dtype}: training attends to keys and values as they are")
    if adapters:
        reasons.append("with adapters: those are added to the weights elsewhere, and to the results here")
    if model.precision.compute != "float32":
        reasons.append(f"the model computes in {model.precision.compute}: its sums are rounded by their order")
    if find(model.cfg, ExpertsRole):
        reasons.append("it has experts, whose products have as many rows as tokens chose them")
    if has_latents(model.cfg):
        reasons.append("it has latent attention, which steps compute in the space of the latents and training does not")
    if reasons:
        raise RequestError(
            f"the mode parity cannot serve this model: {reasons[0]}\n"
            "    expected: float32, multi-head or grouped-query attention, dense feed-forward layers\n"
            "    fix: mode=fast, which is within rounding"
        )
