"""`parity` mode: supported models and devices, and minimum numbers of rows."""

import math
from collections.abc import Sequence
from typing import Any

from flax import nnx

from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.compose.program import Program
from axlearn_core.config import Node, find
from axlearn_core.config.node import interface_fields
from axlearn_core.config.roles import CompetingTokensRole
from axlearn_core.errors import RequestError
from axlearn_core.nn.linear import Linear
from axlearn_plugins_serving.engine_capabilities import HasConfig
from axlearn_plugins_serving.paged_cache_feature import has_latents
from axlearn_plugins_transformer.attention_variants.alibi import Alibi
from axlearn_plugins_transformer.attention_variants.lightning_indexer import LightningIndexer
from axlearn_plugins_transformer.layer_roles import ExpertsKernelRole, ExpertsRole, RecurrentRole
from axlearn_plugins_transformer.paged_cache import PagedCache

ROWS = 64
"""Minimum number of rows outside attention in `parity` mode. XLA for CPU multiplies fewer rows with a different algorithm. The
minimum depends on the input size of the maps: 56 rows for 256 inputs, 40 for 512 and 640, 24 for 768, and 4 for 1,024 or
more."""
NARROW_OUTPUTS, NARROW_MAP_ROWS = 8, 96
"""Minimum number of rows of maps with at most this many outputs, such as adapters of a small rank. XLA for CPU multiplies 80 rows
or fewer with a different algorithm."""
WIDE_MAP_ROWS = {1024: 8, 768: 24}
"""Smallest input size of the maps -> minimum number of rows, for models with only wide maps (see `has_wide_maps`)."""
MIN_WIDE_INPUTS, INPUT_MULTIPLE, OUTPUT_MULTIPLE = 768, 256, 64
"""Conditions on a map's input and output sizes under which it needs fewer rows. Tested with 11 input sizes and 14 output sizes."""


def min_rows(model: Any) -> int:
    """Return the number of rows to pad to so that results are bitwise equal.

    With this padding, the results of `model`, a `CausalLM`, do not depend on the number of rows.
    """
    if has_narrow_maps(model):
        return NARROW_MAP_ROWS
    if not has_wide_maps(model) or find(model.cfg, ExpertsRole):  # the maps of routers are narrow
        return ROWS
    least = min(math.prod(m.cfg.input_dims) for m in _maps(model))
    return next(rows for inputs, rows in WIDE_MAP_ROWS.items() if least >= inputs)


def has_wide_maps(model: Any, devices: int = 1) -> bool:
    """Return True if all linear maps of a `CausalLM` are wide.

    See `MIN_WIDE_INPUTS`. The outputs of each map are split over `devices`.

    XLA for CPU then computes the same bits for a shard of the outputs as for all of them. Tested on 2 devices.
    """
    maps = _maps(model)
    inputs = [math.prod(m.cfg.input_dims) for m in maps]
    outputs = [math.prod(m.cfg.output_dims) for m in maps] + [model.vocab_size]  # the head may be the embedding
    multiple = OUTPUT_MULTIPLE * devices
    wide = all(n >= MIN_WIDE_INPUTS and n % INPUT_MULTIPLE == 0 for n in inputs) and all(
        n % multiple == 0 for n in outputs
    )
    return bool(maps) and wide and all(type(m) is Linear for m in maps)


def has_narrow_maps(model: Any) -> bool:
    """Return True if a linear map of a `CausalLM` or one of its adapters has at most `NARROW_OUTPUTS` outputs."""
    outputs = [math.prod(m.cfg.output_dims) for m in _maps(model)]
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    ranks = [value.shape[-1] for path, value in params if path[-1] == "lora_a"]
    return min([*outputs, *ranks], default=NARROW_OUTPUTS + 1) <= NARROW_OUTPUTS


def _maps(model: Any) -> list[Any]:
    """Return the projections of a model.

    Their parents offer them `input_dims` and `output_dims`.
    """
    modules = [module for _, module in nnx.iter_modules(model) if isinstance(module, HasConfig)]
    built = [module for module in modules if isinstance(module.cfg, Node)]
    return [module for module in built if {"input_dims", "output_dims"} <= interface_fields(type(module.cfg))]


def find_parity_problem(program: Program | ModelProgram) -> str | None:
    """Return the reason why a program's devices cannot split matmuls with bitwise equal results.

    Returns None if they can, or if there is only one device.
    """
    mesh, model = program.layout.mesh, program.functional.describe()
    if mesh.size == 1:
        return None
    if mesh.size > 2 or mesh.devices.flat[0].platform != "cpu":
        return "only two CPU devices have been tested"
    if program.mesh.rules:
        return "the rules of its mesh may split sums"
    if not has_wide_maps(model, mesh.size):
        return (
            "XLA sums narrow maps in a different order: each map needs 768 or more inputs, a multiple of 256, "
            "and a multiple of 128 outputs"
        )
    if find(model.cfg, Alibi):
        return "position biases have not been tested"
    if find(model.cfg, ExpertsRole):
        return "each device would sum the outputs of its own experts"
    if has_latents(model.cfg):
        return "latent attention has not been tested"
    return None


def check_parity(
    model: Any,
    adapters: Sequence[str] = (),
    cache_dtype: str | None = None,
    program: Program | ModelProgram | None = None,
    kernel: str | None = None,
) -> None:
    """Raise `RequestError` if steps cannot match the training program bit for bit."""
    if program is not None and (refusal := find_parity_problem(program)) is not None:
        raise RequestError(
            f"the mode parity cannot serve this model on {program.layout.mesh.size} devices: {refusal}\n"
            "    fix: serving.tensor_parallel=1, or mode=fast, which matches within rounding"
        )
    if kernel not in (None, "invariant"):
        raise RequestError(
            f"the mode parity supports only the kernel 'invariant'\n    got: serving.runner.kernel={kernel}\n"
            "    fix: remove the kernel setting, or use mode=fast"
        )
    stores = [cache.store for cache in find(model.cfg, PagedCache).values() if cache.store is not None]
    cache_dtype = cache_dtype or next(iter(stores), None)
    reasons = []
    if cache_dtype is not None:
        reasons.append(f"its cache is in {cache_dtype}, but training does not quantize keys and values")
    if adapters:
        reasons.append("it has adapters, which are applied to results here and merged into weights elsewhere")
    if model.precision.compute != "float32":
        reasons.append(f"it computes in {model.precision.compute}, so its rounding depends on the order of sums")
    if find(model.cfg, CompetingTokensRole):
        reasons.append("tokens compete for its experts, so the result for a token depends on the rest of the batch")
    if not all(find(experts, ExpertsKernelRole) for experts in find(model.cfg, ExpertsRole).values()):
        reasons.append("it has experts without a batch-invariant kernel")
    if find(model.cfg, RecurrentRole):
        reasons.append("it has recurrent layers, which compute a prompt in chunks and an output token by token")
    if find(model.cfg, LightningIndexer):
        reasons.append("its latent attention chooses keys with an indexer, which has not been tested")
    if reasons:
        raise RequestError(
            f"the mode parity cannot serve this model: {reasons[0]}\n"
            "    expected: float32, attention without states, experts that keep every token\n"
            "    fix: use mode=fast, which matches within rounding"
        )
