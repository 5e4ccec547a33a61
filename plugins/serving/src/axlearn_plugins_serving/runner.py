"""`ModelRunner`: computes steps of a model over a cache of blocks, by functions that are compiled before the first request.

`RunnerProgram` is those functions. It stands without a runner too: a plan compiles it for devices that are not here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from flax import nnx

from axlearn_core.compose import Function, Functional, ModelWeights, Program
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import Problem, RequestError
from axlearn_core.run.notices import log_message
from axlearn_plugins_serving.contracts import Pending, Row, Sampling
from axlearn_plugins_serving.functions import ServingFunctions, Sizes
from axlearn_plugins_serving.packing import Packer, StepResult
from axlearn_plugins_serving.paged import UsePagedCache, visible_window
from axlearn_plugins_serving.parity import check_parity, least_rows
from axlearn_plugins_serving.programs import Loading, Shapes, each_function, identity, load_programs
from axlearn_plugins_serving.serving_linear import WeightLayout, own_products, stores_transposed
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_serving.token_sampling import MAX_BIAS, table_row

if TYPE_CHECKING:
    from axlearn_plugins_finetune.lora.rows import RowAdapters

MOVED = 16
"""Blocks that are copied, read or written at once."""
FIRST = ("serve_tables", "serve_cache", "serve_weights")
"""Functions that make what steps work on."""


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
            max_context: tokens of a request, its output included. By default 2,048, or fewer if the model was made for fewer.
            beyond_context: allows a longer context than the model was made for, where RoPE extrapolates.
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
        beyond_context: bool = False
        max_step_tokens: int = setting(default=512, ge=1)
        chunk: int = setting(default=32, ge=1)
        row_buckets: tuple[int, ...] = (1, 4)
        chunk_buckets: tuple[int, ...] = (1, 2, 4, 6, 8, 10, 12, 14)
        decode_steps: int = setting(default=1, ge=1)
        mode: Literal["fast", "parity"] = "fast"
        cache_dtype: Literal["int8", "float8_e4m3fn"] | None = None
        adapters: Mapping[str, str] = {}
        kernel: str | None = None

        def validate(self) -> Iterable[Problem]:
            """Buckets that are not sizes, and more tokens than steps can count."""
            yield from super().validate()
            most = 2**31 // max(1, self.block_size) - 1
            if self.total_blocks > most:
                yield Problem(
                    path="num_blocks",
                    message="a step counts tokens of the cache in 32 bits",
                    got=str(self.total_blocks),
                    expected=f"at most {most}",
                )
            for name in ("row_buckets", "chunk_buckets"):
                if any(size < 1 for size in getattr(self, name)):
                    yield Problem(
                        path=name, message="not sizes", got=str(getattr(self, name)), expected="at least 1 each"
                    )

        @property
        def blocks_per_request(self) -> int:
            """The most blocks that one request can have."""
            return -(-self.max_context // max(1, self.block_size))

        @property
        def total_blocks(self) -> int:
            """Blocks of the cache."""
            return self.num_blocks or self.max_rows * self.blocks_per_request

        def buckets(self) -> list[StepBucket]:
            """The shapes of steps; smaller ones first."""
            rows = sorted({min(n, self.max_rows) for n in (*self.row_buckets, self.max_rows)})
            most = -(-self.max_step_tokens // self.chunk)
            chunks = sorted({min(n, most) for n in (*self.chunk_buckets, most)})

            def bucket(rows: int, chunks: int) -> StepBucket:
                return StepBucket(rows, chunks, self.chunk, self.blocks_per_request)

            alone = [bucket(0, k) for k in sorted({chunks[0], most})]
            return [*[bucket(n, 0) for n in rows], *alone, *[bucket(rows[-1], k) for k in chunks]]

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
        self.max_blocks_per_request, self.num_blocks = cfg.blocks_per_request, cfg.total_blocks
        self.chunk, self.max_context, self.max_logit_bias = cfg.chunk, cfg.max_context, MAX_BIAS
        # Chunks of prompts beside a token of every request, so that steps with prompts are as full as they can be.
        self.max_prompt_tokens = -(-cfg.max_step_tokens // cfg.chunk) * cfg.chunk
        self.max_step_tokens = self.max_prompt_tokens + cfg.max_rows
        self.vocab_size: int = model.vocab_size
        self.window = visible_window(model.cfg)
        if cfg.mode == "parity":
            check_parity(model, self.adapters, cfg.cache_dtype, program, cfg.kernel)
        self.program = RunnerProgram.beside(program, cfg, model)
        self.buckets = self.program.buckets
        for note in self.program.notes():
            log_message(f"note: {note}")
        if programs is not None:
            load_programs(self.program, self.program.shapes(), self.program.configs, programs)
        self._tables: Any = self.program.compile("serve_tables")()
        self.cache: Any = self.program.compile("serve_cache")()
        self.program.declare_steps(self.cache)
        self._sampling: dict[int, Sampling] = {}
        self._warm: int | None = None
        loaded = model_weights(self.program.functional, model) if weights is None else weights()
        self._set_adapters(loaded)
        self.update_weights(loaded)
        self._loading: Loading | None = None
        if programs is not None:  # after the weights, because the start waits for those alone
            self._loading = Loading(self.program, self.program.step_shapes())
        self._packer = Packer(self.buckets, self.max_rows)

    @property
    def compilations(self) -> int:
        """How many functions were compiled since `warm_up` ended."""
        return 0 if self._warm is None else self._count_compiled() - self._warm

    def warm_up(self) -> None:
        """Compiles all functions that steps may need. Exported ones are loaded in the background."""
        if self._loading is None:
            self.program.compile_all(each_function(self.program.step_shapes()))
        self._warm = self._count_compiled()

    def _count_compiled(self) -> int:
        return sum(not self.program.exported(*function) for function in self.program.compiled)

    def close(self) -> None:
        """Ends loading."""
        if self._loading is not None:
            self._loading.stop()

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
        functional, adapters = self.program.functional, read_adapters(self.cfg.adapters)
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


class RunnerProgram(ModelProgram):
    """The functions of a runner, on devices that need not be here. Its steps are declared once the cache is known.

    Attributes:
        cfg: of the runner.
        model: the config of the model, without the caches and adapters of the runner.
        buckets: the shapes of steps; smaller ones first.
    """

    def __init__(
        self,
        cfg: ModelRunner.Config,
        model: Node[Any],
        devices: Sequence[Any],
        mesh: Mesh | None = None,
        target: Target | None = None,
    ):
        """`model` is the config of a `CausalLM`; see `ModelProgram` for the others."""
        self.cfg, self.model, self.buckets = cfg, model, cfg.buckets()
        self._weight_layout: WeightLayout | None = _weight_layout(cfg, model, devices)
        kernel = cfg.kernel or ("invariant" if cfg.mode == "parity" else None)
        on_cpu = devices[0].platform == "cpu"
        cache = UsePagedCache(page_size=cfg.block_size, heads_first=on_cpu, store=cfg.cache_dtype, kernel=kernel)
        served = cache.apply(model)
        if cfg.adapters:
            served = read_adapters(cfg.adapters).apply(served)
        super().__init__(Functional.of(served), devices, mesh, target, self._declare)

    @classmethod
    def beside(cls, program: Program | ModelProgram | None, cfg: ModelRunner.Config, model: Any) -> "RunnerProgram":
        """The program for a model on the devices of the program that it belongs to, or on one device."""
        if program is None:
            return cls(cfg, model.cfg, jax.local_devices()[:1])
        return cls(cfg, model.cfg, list(program.layout.mesh.devices.flat), program.mesh, program.target)

    @classmethod
    def with_steps(
        cls,
        cfg: ModelRunner.Config,
        model: Node[Any],
        devices: Sequence[Any],
        mesh: Mesh | None = None,
        target: Target | None = None,
    ) -> "RunnerProgram":
        """The program with all its functions, and nothing on its devices."""
        program = cls(cfg, model, devices, mesh, target)
        shapes, places = program.trace("serve_cache").out_info, program.compile("serve_cache").output_shardings
        program.declare_steps(
            jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
        )
        return program

    @property
    def configs(self) -> Mapping[str, Node[Any]]:
        """All that the functions are made from."""
        return {"model": self.model, "runner": self.cfg}

    def _declare(self, model: Any) -> Mapping[str, Function]:
        cfg = self.cfg
        sizes = Sizes(
            blocks=cfg.total_blocks,
            block_size=cfg.block_size,
            slots=cfg.max_rows,
            moved=MOVED,
            steps=cfg.decode_steps,
            adapters=len(cfg.adapters),
            least=least_rows(model) if cfg.mode == "parity" else 1,
            layout=self._weight_layout,
        )
        self._serving = ServingFunctions(model, sizes)
        return self._serving.declare()

    def declare_steps(self, cache: Any) -> None:
        """Adds the steps. `cache` is what `serve_cache` gives: arrays, or abstract ones with their shardings."""
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        self.functions.update(self._serving.declare_steps(specs))

    def step_shapes(self) -> Shapes:
        """All functions that steps may need."""
        moves = ("serve_assign", "serve_mask", "serve_copy", "serve_read", "serve_write")
        shapes: dict[str, Sequence[StepBucket | None]] = {**{name: [None] for name in moves}, "serve": self.buckets}
        if self.cfg.decode_steps > 1:
            shapes["serve_decode"] = [bucket for bucket in self.buckets if not bucket.chunks]
        return shapes

    def shapes(self) -> Shapes:
        """Everything that a runner computes."""
        return {**{name: [None] for name in FIRST}, **self.step_shapes()}

    def notes(self) -> tuple[str, ...]:
        """Names the linear maps that keep their weights as training has them although others do not."""
        return () if self._weight_layout is None else own_products(self.functional.describe())

    def export_all(self, directory: Path) -> None:
        """Compiles what is not compiled yet, and writes all functions to a new directory.

        Raises:
            RequestError: the directory exists, or a function cannot be written.
        """
        self.export(directory, self.shapes(), identity(self, self.configs))


def model_weights(functional: Functional, model: Any) -> ModelWeights:
    """The arrays of a model that may lack the adapters of `functional`."""
    flat = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(model))}
    parts = functional.abstract, functional.variables
    return ModelWeights(*({p: flat[p] for p in part if p in flat} for part in parts))


def read_adapters(directories: Mapping[str, str]) -> "RowAdapters":
    """The adapters in directories, by name.

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
    return RowAdapters.read(directories)


def _weight_layout(cfg: ModelRunner.Config, model: Node[Any], devices: Sequence[Any]) -> WeightLayout | None:
    """The layout for the weights of linear maps; None keeps the one of training."""
    if cfg.mode == "parity":
        return "column_parallel" if len(devices) > 1 else None
    return "transposed" if not cfg.adapters and stores_transposed(model, devices) else None
