"""How a runner stores the weights of linear maps, and how many rows it multiplies them with at least."""

import math
from collections.abc import Sequence
from typing import Any

from flax import nnx

from axlearn_core.config import Node, find
from axlearn_core.nn.linear import Linear
from axlearn_plugins_serving.paged import has_latents
from axlearn_plugins_transformer.attention_variants.alibi import Alibi

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
    return [m for _, m in nnx.iter_modules(model) if hasattr(getattr(m, "cfg", None), "input_dims")]


def refusal_of_parity(program: Any) -> str | None:
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


def stores_transposed(model: Node[Any], devices: Sequence[Any]) -> bool:
    """Whether the maps of a model are stored as [outputs, inputs]: on CPUs, where nothing but the map reads its weight."""
    if devices[0].platform != "cpu":
        return False
    return not has_latents(model)
