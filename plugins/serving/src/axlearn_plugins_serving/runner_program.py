"""The program of a `ModelRunner`: the shapes of its steps, its functions, and which models it can serve bit for bit."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from flax import nnx

from axlearn_core.compose import Functional, ModelWeights
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node, find
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.functions import ServingFunctions, Sizes
from axlearn_plugins_serving.paged import UsePagedCache, has_latents
from axlearn_plugins_serving.serving_linear import WeightLayout, own_products
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_serving.weight_layout import least_rows, refusal_of_parity, stores_transposed
from axlearn_plugins_transformer.layer_roles import ExpertsRole

RunnerConfig: TypeAlias = Any
"""The config of a `ModelRunner`, whose module imports this one."""
MOVED = 16
"""Blocks that are copied, read or written at once."""


def block_counts(cfg: RunnerConfig) -> tuple[int, int]:
    """Blocks: the most of one request, and all of the cache."""
    each = -(-cfg.max_context // max(1, cfg.block_size))
    return each, cfg.num_blocks or cfg.max_rows * each


def buckets(cfg: RunnerConfig, blocks: int) -> list[StepBucket]:
    """The shapes of steps; smaller ones first."""
    rows = sorted({min(n, cfg.max_rows) for n in (*cfg.row_buckets, cfg.max_rows)})
    most = -(-cfg.max_step_tokens // cfg.chunk)
    chunks = sorted({min(n, most) for n in (*cfg.chunk_buckets, most)})
    plain = [StepBucket(n, 0, cfg.chunk, blocks) for n in rows]
    alone = sorted({chunks[0], most})
    mixed = [StepBucket(0, k, cfg.chunk, blocks) for k in alone]
    mixed += [StepBucket(rows[-1], k, cfg.chunk, blocks) for k in chunks]
    return [*plain, *mixed]


def step_functions(cfg: RunnerConfig, buckets: Sequence[StepBucket]) -> dict[str, list[StepBucket | None]]:
    """Name -> shapes, of all functions that steps may need."""
    functions: dict[str, list[StepBucket | None]] = {
        name: [None] for name in ("serve_assign", "serve_mask", "serve_copy", "serve_read", "serve_write")
    }
    functions["serve"] = [*buckets]
    if cfg.decode_steps > 1:
        functions["serve_decode"] = [b for b in buckets if not b.chunks]
    return functions


def model_weights(functional: Functional, model: Any) -> ModelWeights:
    """The arrays of a model that may lack the adapters of `functional`."""
    flat = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(model))}
    parts = functional.abstract, functional.variables
    return ModelWeights(*({p: flat[p] for p in part if p in flat} for part in parts))


def read_adapters(cfg: RunnerConfig) -> Any:
    """The adapters of a config, a `RowAdapters`.

    Raises:
        RequestError: the plugin for them is not installed, or they cannot be chosen by row.
        CheckpointError: a directory holds none.
    """
    try:
        from axlearn_plugins_finetune.lora.rows import RowAdapters
    except ImportError as error:
        raise RequestError(
            f"adapters need a plugin that is not installed: {error}\n    fix: pip install axlearn-plugins-finetune"
        ) from error
    return RowAdapters.read(cfg.adapters)


def check_parity(
    model: Any,
    adapters: Sequence[str] = (),
    cache_dtype: str | None = None,
    program: Any = None,
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


def weight_layout(cfg: RunnerConfig, model: Node[Any], devices: Sequence[Any]) -> WeightLayout | None:
    """How a runner stores the weights of linear maps. None leaves them as training has them."""
    if cfg.mode == "parity":
        return "column_parallel" if len(devices) > 1 else None
    return "transposed" if not cfg.adapters and stores_transposed(model, devices) else None


def layout_notes(cfg: RunnerConfig, program: ModelProgram) -> tuple[str, ...]:
    """For a person: the linear maps of a runner's model whose weights stay as they are although others are laid out anew."""
    model = program.functional.describe()
    devices = list(program.layout.mesh.devices.flat)
    return () if weight_layout(cfg, model.cfg, devices) is None else own_products(model)


def _functions(cfg: RunnerConfig, blocks: int, model: Any, devices: Sequence[Any]) -> ServingFunctions:
    """Those of a model with abstract arrays, whose caches are paged."""
    sizes = Sizes(
        blocks=blocks,
        block_size=cfg.block_size,
        slots=cfg.max_rows,
        moved=MOVED,
        steps=cfg.decode_steps,
        adapters=len(cfg.adapters),
        least=least_rows(model) if cfg.mode == "parity" else 1,
        layout=weight_layout(cfg, model.cfg, devices),
    )
    return ServingFunctions(model, sizes)


def runner_program(cfg: RunnerConfig, blocks: int, model: Any, program: Any) -> ModelProgram:
    """The program of a runner, on the devices of `program`, or on one device."""
    if program is None:
        return declare_program(cfg, blocks, model.cfg, jax.local_devices()[:1])
    devices = list(program.layout.mesh.devices.flat)
    return declare_program(cfg, blocks, model.cfg, devices, program.mesh, program.target)


def declare_program(
    cfg: RunnerConfig,
    blocks: int,
    model: Node[Any],
    devices: Sequence[Any],
    mesh: Mesh | None = None,
    target: Target | None = None,
) -> ModelProgram:
    """The program of a runner, whose steps are declared once its cache is known; `model` is the config of the model."""
    on_cpu = devices[0].platform == "cpu"
    kernel = cfg.kernel or ("invariant" if cfg.mode == "parity" else None)
    layout = UsePagedCache(page_size=cfg.block_size, heads_first=on_cpu, store=cfg.cache_dtype, kernel=kernel)
    paged = layout.apply(model)
    if cfg.adapters:
        paged = read_adapters(cfg).apply(paged)
    return ModelProgram(
        Functional.of(paged), devices, mesh, target, lambda model: _functions(cfg, blocks, model, devices).declare()
    )


def abstract_program(
    cfg: RunnerConfig,
    model: Node[Any],
    devices: Sequence[Any],
    mesh: Mesh | None = None,
    target: Target | None = None,
) -> ModelProgram:
    """The program of a runner with all its functions declared, and nothing on its devices, which need not be here."""
    _, blocks = block_counts(cfg)
    program = declare_program(cfg, blocks, model, devices, mesh, target)
    shapes, places = program.trace("serve_cache").out_info, program.compile("serve_cache").output_shardings
    cache = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
    declare_steps(program, cfg, blocks, cache)
    return program


def declare_steps(program: ModelProgram, cfg: RunnerConfig, blocks: int, cache: Any) -> None:
    """Adds the steps to a program; `cache` is what `serve_cache` gives, as abstract arrays with their shardings."""
    devices = list(program.layout.mesh.devices.flat)
    functions = _functions(cfg, blocks, program.functional.describe(), devices)
    program.functions.update(functions.declare_steps(cache))
