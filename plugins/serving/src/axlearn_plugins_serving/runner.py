"""`ModelRunner`: computes steps of a model over a cache of blocks, by functions that are compiled before the first request."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import jax
import numpy as np
from flax import nnx

from axlearn_core.compose import Functional, ModelWeights, Program
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Configurable, Node, find, node, setting
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import Problem, RequestError
from axlearn_plugins_serving.contracts import Pending, Row, Sampling
from axlearn_plugins_serving.functions import ServingFunctions, Sizes
from axlearn_plugins_serving.packing import Packer, StepResult
from axlearn_plugins_serving.paged import UsePagedCache, visible_window
from axlearn_plugins_serving.sampling import MAX_BIAS, table_row
from axlearn_plugins_serving.steps import StepBucket
from axlearn_plugins_serving.weight_layout import LEAST_ROWS, stores_transposed

MOVED = 16
"""Blocks that are copied, read or written at once."""


class ModelRunner(Configurable):
    """Computes steps of one model on the devices of one program. See `contracts.Runner`.

    Args:
        cfg: the sizes.
        model: a `CausalLM` with its weights.
        program: of the run that the model belongs to: its mesh and devices are used. By default one device.
        programs: a directory with the exported programs of such a runner, which are loaded instead of compiled.
        weights: gives those of a model with abstract arrays, when everything else is there.
    """

    @node
    class Config(Configurable.Config["ModelRunner"]):
        """Everything that shapes depend on: a step has the smallest of the declared shapes that holds its rows.

        Attributes:
            block_size: tokens of a block.
            num_blocks: of the cache; None has room for `max_rows` requests of `max_context` tokens.
            max_rows: requests that run at one time.
            max_context: tokens of a request, its output included.
            max_step_tokens: tokens of prompts in one step, rounded up to whole chunks.
            chunk: tokens of a prompt that are computed as one row of a step; a prompt has as many rows as it needs.
            row_buckets: how many requests a step that decodes has room for; `max_rows` is always one.
            chunk_buckets: how many chunks a step has room for; as many as `max_step_tokens` needs is always one. Steps
                without a request that decodes have room for the fewest or the most.
            decode_steps: tokens that one dispatch decodes at most.
            mode: `fast`, or `parity`: bit for bit what the training program computes in its batch-invariant mode.
            cache_dtype: of keys and values in the cache, with a scale for each token and head; None is the model's own.
            adapters: name -> a directory that `axlearn lora export` wrote; requests choose one of these by its name.
            kernel: a kernel of the op `paged_attention`; None takes the best one of the mode.
        """

        block_size: int = setting(default=32, ge=1)
        num_blocks: int | None = setting(default=None, ge=1)
        max_rows: int = setting(default=16, ge=1)
        max_context: int = setting(default=2048, ge=1)
        max_step_tokens: int = setting(default=256, ge=1)
        chunk: int = setting(default=32, ge=1)
        row_buckets: tuple[int, ...] = (1, 4)
        chunk_buckets: tuple[int, ...] = (1, 2, 4, 6)
        decode_steps: int = setting(default=1, ge=1)
        mode: Literal["fast", "parity"] = "fast"
        cache_dtype: Literal["int8", "float8_e4m3fn"] | None = None
        adapters: Mapping[str, str] = {}
        kernel: str | None = None

        def validate(self) -> Iterable[Problem]:
            """Buckets that are not sizes, and more tokens than steps can count."""
            yield from super().validate()
            most = 2**31 // max(1, self.block_size) - 1
            if block_counts(self)[1] > most:
                yield Problem(
                    path="num_blocks",
                    message="a step counts tokens of the cache in 32 bits",
                    got=str(block_counts(self)[1]),
                    expected=f"at most {most}",
                )
            for name in ("row_buckets", "chunk_buckets"):
                if any(size < 1 for size in getattr(self, name)):
                    yield Problem(
                        path=name, message="not sizes", got=str(getattr(self, name)), expected="at least 1 each"
                    )

    def __init__(
        self,
        cfg: Config,
        *,
        model: Any,
        program: Program | ModelProgram | None = None,
        programs: Path | None = None,
        weights: Callable[[], ModelWeights] | None = None,
    ):
        self.cfg = cfg
        self.adapters = tuple(cfg.adapters)
        self.block_size, self.max_rows, self.decode_steps = cfg.block_size, cfg.max_rows, cfg.decode_steps
        self.max_blocks_per_request, self.num_blocks = block_counts(cfg)
        self.chunk, self.max_context, self.max_logit_bias = cfg.chunk, cfg.max_context, MAX_BIAS
        # Chunks of prompts beside a token of every request, so that steps with prompts are as full as they can be.
        self.max_prompt_tokens = -(-cfg.max_step_tokens // cfg.chunk) * cfg.chunk
        self.max_step_tokens = self.max_prompt_tokens + cfg.max_rows
        self.vocab_size: int = model.vocab_size
        self.window = visible_window(model.cfg)
        if cfg.mode == "parity":
            check_parity(model, self.adapters, cfg.cache_dtype)
        self.buckets = buckets(cfg, self.max_blocks_per_request)
        self.program = _program(cfg, self.num_blocks, model, program)
        if programs is not None:
            from axlearn_plugins_serving.programs import load_programs

            load_programs(self.program, cfg, self.buckets, model.cfg, programs)
        self._tables: Any = self.program.compile("serve_tables")()
        self.cache: Any = self.program.compile("serve_cache")()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.cache)
        declare_steps(self.program, cfg, self.num_blocks, shapes)
        if programs is not None:
            from axlearn_plugins_serving.programs import preload

            preload(self.program, cfg, self.buckets)
        self._sampling: dict[int, Sampling] = {}
        self._warm = 0
        loaded = model_weights(self.program.functional, model) if weights is None else weights()
        self._set_adapters(loaded)
        self.update_weights(loaded)
        self._packer = Packer(self.buckets, self.max_rows)

    @property
    def compilations(self) -> int:
        """How many functions were compiled since `warm_up` ended."""
        return len(self.program.compiled) - self._warm if self._warm else 0

    def warm_up(self) -> None:
        """Compiles all functions that steps may need."""
        for name, shapes in step_functions(self.cfg, self.buckets).items():
            for bucket in shapes:
                self.program.compile(name, bucket)
        self._warm = len(self.program.compiled)

    def assign(
        self, slot: int, sampling: Sampling, seed: int, output: Sequence[int], adapter: str | None = None
    ) -> None:
        """See `Runner`."""
        self._sampling[slot] = sampling
        number = 0 if adapter is None else 1 + self.adapters.index(adapter)
        row = table_row(sampling, seed, output, self.vocab_size, number)
        self._tables = self.program.compile("serve_assign")(self._tables, np.int32(slot), row)

    def submit(self, rows: Sequence[Row], steps: int = 1) -> Pending:
        """See `Runner`."""
        if steps > self.decode_steps or (steps > 1 and any(row.tokens or row.mask is not None for row in rows)):
            raise RequestError(
                f"the runner cannot do {steps} steps at once\n    got: rows {len(rows)}\n"
                f"    expected: at most {self.decode_steps}, and rows that decode without masks"
            )
        self._put_masks(rows)
        options = [self._sampling[row.slot] for row in rows]
        calls, places = self._packer.pack(rows, options)
        results = []
        for bucket, packed in calls:
            state = self._arrays, self.cache, self._tables, packed
            if steps > 1:
                sampled, self.cache, self._tables = self.program.compile("serve_decode", bucket)(
                    *state, np.int32(steps)
                )
                results.append((sampled, None))
            else:
                sampled, targets, self.cache, self._tables = self.program.compile("serve", bucket)(*state)
                results.append((sampled, targets))
        return StepResult(rows, options, places, results, steps)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner`."""
        for begin in range(0, len(pairs), MOVED):
            part = pairs[begin : begin + MOVED]
            source, target = self._ids([s for s, _ in part]), self._ids([t for _, t in part])
            self.cache = self.program.compile("serve_copy")(self.cache, source, target)

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """See `Runner`."""
        read, parts = self.program.compile("serve_read"), []
        for begin in range(0, len(blocks), MOVED):
            part = blocks[begin : begin + MOVED]
            contents = jax.device_get(read(self.cache, self._ids(part)))
            parts.append(jax.tree.map(lambda x, n=len(part): x[:n], contents))
        if not parts:
            return jax.tree.map(lambda x: np.zeros((0, *x.shape[1:]), x.dtype), self.cache)
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def write_blocks(self, blocks: Sequence[int], contents: Any) -> None:
        """See `Runner`."""
        for begin in range(0, len(blocks), MOVED):
            ids = self._ids(blocks[begin : begin + MOVED])
            end = min(begin + MOVED, len(blocks))
            pad = MOVED - (end - begin)
            part = jax.tree.map(
                lambda x, a=begin, b=end, n=pad: np.concatenate([x[a:b], np.zeros((n, *x.shape[1:]), x.dtype)]),
                contents,
            )
            self.cache = self.program.compile("serve_write")(self.cache, ids, part)

    def update_weights(self, weights: ModelWeights) -> None:
        """See `Runner`."""
        functional = self.program.functional
        weights = ModelWeights({**weights.params, **self._adapter_arrays}, weights.variables)
        for part, specs in ((weights.params, functional.abstract), (weights.variables, functional.variables)):
            wrong = [p for p, s in specs.items() if p not in part or tuple(part[p].shape) != tuple(s.shape)]
            if wrong:
                actual = f"{part[wrong[0]].shape}" if wrong[0] in part else "nothing"
                raise RequestError(
                    f"these are not weights of the model that is served: {wrong[0]}\n"
                    f"    got: {actual}\n    expected: {specs[wrong[0]].shape}"
                )
        self._arrays: Any = self.program.compile("serve_weights")(self.program.place(weights))

    def _set_adapters(self, weights: ModelWeights) -> None:
        """Reads the adapters, and checks that they belong to the model."""
        self._adapter_arrays: dict[str, np.ndarray] = {}
        if not self.adapters:
            return
        functional, adapters = self.program.functional, read_adapters(self.cfg)
        adapters.check(weights.params)
        self._adapter_arrays = adapters.arrays(functional.abstract)

    def _ids(self, blocks: Sequence[int]) -> np.ndarray:
        return np.asarray([*blocks, *[self.num_blocks] * (MOVED - len(blocks))], np.int32)

    def _put_masks(self, rows: Sequence[Row]) -> None:
        masked = [row for row in rows if row.mask is not None]
        if not masked:
            return
        slots = np.full((self.max_rows,), self.max_rows, np.int32)
        masks = np.zeros((self.max_rows, -(-self.vocab_size // 32)), np.uint32)
        for index, row in enumerate(masked):
            slots[index], masks[index] = row.slot, np.asarray(row.mask)
        self._tables = self.program.compile("serve_mask")(self._tables, slots, masks)


def block_counts(cfg: ModelRunner.Config) -> tuple[int, int]:
    """Blocks: the most of one request, and all of the cache."""
    each = -(-cfg.max_context // max(1, cfg.block_size))
    return each, cfg.num_blocks or cfg.max_rows * each


def buckets(cfg: ModelRunner.Config, blocks: int) -> list[StepBucket]:
    """The shapes of steps; smaller ones first."""
    floor = LEAST_ROWS if cfg.mode == "parity" else 1
    rows = sorted({max(floor, min(n, cfg.max_rows)) for n in (*cfg.row_buckets, cfg.max_rows)})
    most = -(-cfg.max_step_tokens // cfg.chunk)
    chunks = sorted({min(n, most) for n in (*cfg.chunk_buckets, most)})
    plain = [StepBucket(n, 0, cfg.chunk, blocks) for n in rows]
    alone = sorted({chunks[0], most})
    mixed = [StepBucket(0, k, cfg.chunk, blocks) for k in alone]
    mixed += [StepBucket(rows[-1], k, cfg.chunk, blocks) for k in chunks]
    return [b for b in (*plain, *mixed) if b.tokens >= floor]


def step_functions(cfg: ModelRunner.Config, buckets: Sequence[StepBucket]) -> dict[str, list[StepBucket | None]]:
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


def read_adapters(cfg: ModelRunner.Config) -> Any:
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


def check_parity(model: Any, adapters: Sequence[str] = (), cache_dtype: str | None = None) -> None:
    """Raises `RequestError` where steps of a model cannot be, bit for bit, what its training program computes."""
    reasons = []
    if cache_dtype is not None:
        reasons.append(f"with a cache in {cache_dtype}: training attends to keys and values as they are")
    if adapters:
        reasons.append("with adapters: those are added to the weights elsewhere, and to the results here")
    if model.precision.compute != "float32":
        reasons.append(f"the model computes in {model.precision.compute}: its sums are rounded by their order")
    for fields, reason in (
        ("num_experts", "it has experts, whose products have as many rows as tokens chose them"),
        (
            "latent_cache",
            "it has latent attention, which steps compute in the space of the latents and training does not",
        ),
    ):
        if any(fields in {a.name for a in attrs.fields(type(part))} for part in find(model.cfg, Node).values()):
            reasons.append(reason)
    if reasons:
        raise RequestError(
            f"the mode parity cannot serve this model: {reasons[0]}\n"
            "    expected: float32, multi-head or grouped-query attention, dense feed-forward layers\n"
            "    fix: mode=fast, which is within rounding"
        )


def _transposes(cfg: ModelRunner.Config, model: Node[Any], devices: Sequence[Any]) -> bool:
    return cfg.mode == "fast" and not cfg.adapters and stores_transposed(model, devices)


def _sizes(cfg: ModelRunner.Config, blocks: int, *, transposed: bool) -> Sizes:
    return Sizes(
        blocks=blocks,
        block_size=cfg.block_size,
        slots=cfg.max_rows,
        moved=MOVED,
        steps=cfg.decode_steps,
        adapters=len(cfg.adapters),
        transposed=transposed,
        least=LEAST_ROWS if cfg.mode == "parity" else 1,
    )


def _program(cfg: ModelRunner.Config, blocks: int, model: Any, program: Any) -> ModelProgram:
    if program is None:
        return declare_program(cfg, blocks, model.cfg, jax.local_devices()[:1])
    devices = list(program.layout.mesh.devices.flat)
    return declare_program(cfg, blocks, model.cfg, devices, program.mesh, program.target)


def declare_program(
    cfg: ModelRunner.Config,
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
    functional, transposed = Functional.of(paged), _transposes(cfg, model, devices)
    sizes = _sizes(cfg, blocks, transposed=transposed)
    return ModelProgram(functional, devices, mesh, target, lambda model: ServingFunctions(model, sizes).declare())


def abstract_program(
    cfg: ModelRunner.Config,
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


def declare_steps(program: ModelProgram, cfg: ModelRunner.Config, blocks: int, cache: Any) -> None:
    """Adds the steps to a program; `cache` is what `serve_cache` gives, as abstract arrays with their shardings."""
    devices = list(program.layout.mesh.devices.flat)
    model = program.functional.describe()
    sizes = _sizes(cfg, blocks, transposed=_transposes(cfg, model.cfg, devices))
    functions = ServingFunctions(model, sizes)
    program.functions.update(functions.declare_steps(cache))
