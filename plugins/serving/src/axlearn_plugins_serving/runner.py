"""`ModelRunner`: computes steps of a model over a cache of blocks, by functions that are compiled before the first request."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import Problem, RequestError
from axlearn_core.run.notices import log_message
from axlearn_plugins_serving.contracts import Pending, Row, Sampling
from axlearn_plugins_serving.packing import Packer, StepResult
from axlearn_plugins_serving.paged import visible_window
from axlearn_plugins_serving.programs import Loading, each_function, load_programs
from axlearn_plugins_serving.runner_program import (
    MOVED,
    block_counts,
    buckets,
    check_parity,
    declare_steps,
    layout_notes,
    model_weights,
    read_adapters,
    runner_program,
    step_functions,
)
from axlearn_plugins_serving.token_sampling import MAX_BIAS, table_row


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
            check_parity(model, self.adapters, cfg.cache_dtype, program, cfg.kernel)
        self.buckets = buckets(cfg, self.max_blocks_per_request)
        self.program = runner_program(cfg, self.num_blocks, model, program)
        for note in layout_notes(cfg, self.program):
            log_message(f"note: {note}")
        if programs is not None:
            load_programs(self.program, cfg, self.buckets, model.cfg, programs)
        self._tables: Any = self.program.compile("serve_tables")()
        self.cache: Any = self.program.compile("serve_cache")()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.cache)
        declare_steps(self.program, cfg, self.num_blocks, shapes)
        self._sampling: dict[int, Sampling] = {}
        self._warm: int | None = None
        loaded = model_weights(self.program.functional, model) if weights is None else weights()
        self._set_adapters(loaded)
        self.update_weights(loaded)
        self._loading: Loading | None = None
        if programs is not None:  # after the weights, because the start waits for those alone
            self._loading = Loading(self.program, step_functions(cfg, self.buckets))
        self._packer = Packer(self.buckets, self.max_rows)

    @property
    def compilations(self) -> int:
        """How many functions were compiled since `warm_up` ended."""
        return 0 if self._warm is None else self._count_compiled() - self._warm

    def warm_up(self) -> None:
        """Compiles all functions that steps may need. Exported ones are loaded in the background."""
        if self._loading is None:
            self.program.compile_all(each_function(step_functions(self.cfg, self.buckets)))
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
