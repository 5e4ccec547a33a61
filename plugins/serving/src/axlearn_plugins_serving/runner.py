"""`ModelRunner`: compute a model's steps with a cache of blocks.

It compiles its functions before the first request.

`runner_program` declares these functions.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import jax
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Configurable, node
from axlearn_core.errors import RequestError
from axlearn_core.kernels.selection import Selection
from axlearn_core.run.notices import log_message
from axlearn_plugins_serving.contracts import Row, Sampling, SubmittedStep
from axlearn_plugins_serving.engine_weights import EngineWeights, model_weights, place_weights
from axlearn_plugins_serving.memory_errors import SMALLER_CACHE, SMALLER_WEIGHTS, explain_memory
from axlearn_plugins_serving.packing import Packer, PendingStep
from axlearn_plugins_serving.parity import check_parity
from axlearn_plugins_serving.programs import BackgroundLoader, list_functions, load_programs
from axlearn_plugins_serving.prompt_extras import MAX_SHAPES, PROMPT_FUNCTION, ChunkEmbeddings, PromptBucket, pad_tokens
from axlearn_plugins_serving.runner_config import RunnerConfig
from axlearn_plugins_serving.runner_program import BLOCKS_PER_CALL, RunnerProgram, read_adapters
from axlearn_plugins_serving.slot_tables import SlotTables
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_serving.text_embedding import PendingTexts, pack_texts
from axlearn_plugins_serving.token_sampling import MAX_BIAS
from axlearn_plugins_transformer.cache_spec import has_states, read_prefix, read_window
from axlearn_plugins_transformer.extras import ExtrasError

if TYPE_CHECKING:
    pass


class ModelRunner(Configurable):
    """Runs a model on the devices of a program. See `contracts.Runner`.

    Args:
        cfg: Config of the runner.
        model: A `CausalLM` with its weights.
        program: Program of the run that the model belongs to; sets the mesh and devices. The default is one device.
        programs: Directory with exported programs of this runner, to load instead of compiling.
        weights: Function that returns the weights, if the model's arrays are abstract. It is called last.
        source: Function that reads the weights again: onto the devices, or into the host's memory with `on_host=True`. None if they
            have no source.

    Attributes:
        weights: The arrays that steps read. Empty while their memory is free.
    """

    @node
    class Config(RunnerConfig["ModelRunner"]):
        """Settings for `ModelRunner`; see `RunnerConfig`."""

    def __init__(
        self,
        cfg: Config,
        *,
        model: Any,
        program: Program | ModelProgram | None = None,
        programs: Path | None = None,
        weights: Callable[[], ModelWeights] | None = None,
        source: Callable[..., ModelWeights] | None = None,
    ):
        self.cfg = cfg
        self._slots: list[str | None] = [*cfg.adapters, *[None] * cfg.adapter_slots]
        self._source = source
        self._host_weights: tuple[Any, Any] | None = None  # arrays and shardings, while their memory is free
        self.block_size, self.max_rows, self.decode_steps = cfg.block_size, cfg.max_rows, cfg.decode_steps
        self.max_blocks_per_request, self.num_blocks = cfg.blocks_per_request, cfg.total_blocks
        self.chunk, self.max_context, self.max_logit_bias = cfg.chunk, cfg.max_context, MAX_BIAS
        # Besides the prompt chunks, allow one token per running request, so that steps with prompts can be full.
        self.max_prompt_tokens = -(-cfg.max_step_tokens // cfg.chunk) * cfg.chunk
        self.max_batch_tokens = self.max_prompt_tokens + cfg.max_rows
        self.vocab_size: int = model.vocab_size
        if cfg.mode == "parity":
            check_parity(model, [name or "a free slot" for name in self._slots], cfg.cache_dtype, program, cfg.kernel)
        self.program = RunnerProgram.for_program(program, cfg, model)
        self.buckets, self.window = self.program.buckets, read_window(self.program.cache_spec)
        self.prefix = read_prefix(self.program.cache_spec)
        self.drafts, self.embed_buckets = cfg.drafts, cfg.embed_buckets
        self.num_snapshots = cfg.total_snapshots if has_states(self.program.cache_spec) else None
        for note in self.program.notes():
            log_message(f"note: {note}")
        if programs is not None:
            load_programs(self.program, self.program.shapes(), self.program.configs, programs)
        self._tables = SlotTables(self.program, cfg.max_rows, self.vocab_size)
        with explain_memory("the cache", lambda: self.program.trace("serve_cache").out_info, SMALLER_CACHE):
            self.cache: Any = jax.block_until_ready(self.program.compile("serve_cache")())
        self.program.declare_steps(self.cache)
        self._sampling: dict[int, Sampling] = {}
        self._num_warm: int | None = None
        with explain_memory("the model", lambda: self.program.functional.abstract, SMALLER_WEIGHTS):
            loaded = model_weights(self.program.functional, model) if weights is None else weights()
            self._set_adapters(loaded)
            self._place_weights(loaded)
        self._loader: BackgroundLoader | None = None
        if programs is not None:  # startup waits only for the weights, so load them first
            self._loader = BackgroundLoader(self.program, self.program.step_shapes())
        prompts = self.program.prompts
        self.extras = prompts is not None
        self._packer = Packer(self.buckets, self.max_rows, None if prompts is None else prompts.embedding)
        self._checked_extras: dict[PromptBucket, str | None] = {}
        self._zeros: dict[int, ChunkEmbeddings] = {}

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can use."""
        return tuple(name for name in self._slots if name is not None)

    @property
    def compilations(self) -> int:
        """Number of functions compiled since `warm_up` ended."""
        return 0 if self._num_warm is None else self._count_compiled() - self._num_warm

    def warm_up(self) -> None:
        """Compile all functions that steps may need.

        Exported functions load in the background instead.
        """
        if self._loader is None:
            self.program.compile_all(list_functions(self.program.step_shapes()))
        self._num_warm = self._count_compiled()

    def _count_compiled(self) -> int:
        functions = [function for function in self.program.compiled if function[0] != PROMPT_FUNCTION]
        return sum(not self.program.exported(*function) for function in functions)

    def close(self) -> None:
        """Stop loading programs."""
        if self._loader is not None:
            self._loader.stop()

    def assign(
        self,
        slot: int,
        sampling: Sampling,
        seed: int,
        output: Sequence[int],
        adapter: str | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """See `Runner.assign`."""
        self._sampling[slot] = sampling
        self._tables.assign(slot, sampling, seed, output, self._adapter_number(adapter), prompt)

    def submit(self, rows: Sequence[Row], steps: int = 1) -> SubmittedStep:
        """See `Runner.submit`."""
        if steps > self.decode_steps or (steps > 1 and any(row.tokens or row.mask is not None for row in rows)):
            raise RequestError(
                f"the runner cannot choose {steps} tokens per row in one step\n    got: rows {len(rows)}\n"
                f"    expected: at most {self.decode_steps}, and only rows that decode without masks"
            )
        self._tables.prepare(rows)
        options = [self._sampling[row.slot] for row in rows]
        calls, places = self._packer.pack(rows, options)
        results = []
        for bucket, packed, embeddings in calls:
            state = self.weights.read(), self.cache, self._tables.arrays, packed
            if steps > 1:
                sampled, self.cache, self._tables.arrays = self.program.compile("serve_decode", bucket)(
                    *state, np.int32(steps)
                )
                results.append((sampled, None))
            else:
                sampled, targets, self.cache, self._tables.arrays = self.program.compile("serve", bucket)(
                    *state, embeddings or self._no_embeddings(bucket)
                )
                results.append((sampled, targets))
        return PendingStep(rows, options, places, results, steps)

    def _no_embeddings(self, bucket: StepBucket) -> ChunkEmbeddings | None:
        """Return embeddings for a step, on the devices, that replace none. None if steps of this shape take none."""
        if not (self.extras and bucket.chunks):
            return None
        if bucket.chunks not in self._zeros:
            spec = self.program.arguments("serve", bucket)[-1]
            zeros = jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), spec)
            self._zeros[bucket.chunks] = zeros
        return self._zeros[bucket.chunks]

    def check_extras(self, count: int, extras: Mapping[str, np.ndarray]) -> None:
        """See `TakesExtras.check_extras`."""
        bucket = PromptBucket.fit(count, extras)
        try:
            refusal = self._checked_extras[bucket]
        except KeyError:
            refusal = self._find_refusal(bucket)
            self._checked_extras[bucket] = refusal
        if refusal is not None:
            raise ExtrasError(refusal)

    def _find_refusal(self, bucket: PromptBucket) -> str | None:
        """Return why the model cannot read extras of these shapes, or None if it can."""
        if len(self._checked_extras) > 4 * MAX_SHAPES:  # at most `MAX_SHAPES` of them are accepted
            checked = [*self._checked_extras.items()]  # other threads may add to it
            self._checked_extras = {b: refusal for b, refusal in checked if refusal is None}
        accepted = sum(refusal is None for refusal in [*self._checked_extras.values()])
        if accepted >= MAX_SHAPES:
            return (
                f"the engine has compiled {accepted} shapes of prompts with extras, and compiles no others\n"
                "    fix: pad arrays, so that there are fewer shapes"
            )
        assert self.program.prompts is not None
        try:
            with self.program.tracing(PROMPT_FUNCTION, Selection(platform=self.program.platform, required=())):
                self.program.prompts.check(bucket)
        except ExtrasError as error:
            return str(error)
        return None

    def embed_prompt(self, prompt: Sequence[int], extras: Mapping[str, np.ndarray]) -> np.ndarray:
        """See `TakesExtras.embed_prompt`."""
        bucket = PromptBucket.fit(len(prompt), extras)
        embed = self.program.compile(PROMPT_FUNCTION, bucket)
        embeddings = embed(self.weights.read(), pad_tokens(prompt, bucket.length), dict(extras))
        return np.asarray(jax.device_get(embeddings))[: len(prompt)]

    def embed(self, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> PendingTexts:
        """See `EmbedsTokens.embed`."""
        numbers = [self._adapter_number(adapter) for adapter in adapters]
        bucket, *inputs = pack_texts(self.embed_buckets, prompts, numbers)
        return PendingTexts(self.program.compile("serve_embed", bucket)(self.weights.read(), *inputs), len(prompts))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner.copy_blocks`."""
        for begin in range(0, len(pairs), BLOCKS_PER_CALL):
            part = pairs[begin : begin + BLOCKS_PER_CALL]
            source, target = self._pad_ids([s for s, _ in part]), self._pad_ids([t for _, t in part])
            self.cache = self.program.compile("serve_copy")(self.cache, source, target)

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """See `Runner.read_blocks`."""
        read, parts = self.program.compile("serve_read"), []
        for begin in range(0, len(blocks), BLOCKS_PER_CALL):
            part = blocks[begin : begin + BLOCKS_PER_CALL]
            contents = jax.device_get(read(self.cache, self._pad_ids(part)))
            parts.append(jax.tree.map(lambda x, n=len(part): x[:n], contents))
        if not parts:
            return tuple(np.zeros((0, *s.shape[1:]), s.dtype) for s in self.program.trace("serve_read").out_info)
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    @property
    def records(self) -> tuple[str, ...]:
        """See `RecordsTokens.records`."""
        return self.program.records

    def read_records(self, blocks: Sequence[int], count: int) -> Mapping[str, np.ndarray]:
        """See `RecordsTokens.read_records`."""
        blocks = blocks[: -(-count // self.cfg.block_size)]
        read, parts = self.program.compile("serve_records"), []
        for begin in range(0, max(1, len(blocks)), BLOCKS_PER_CALL):
            part = blocks[begin : begin + BLOCKS_PER_CALL]
            contents = jax.device_get(read(self.cache, self._pad_ids(part)))
            parts.append({name: x[: len(part)].reshape(-1, *x.shape[2:]) for name, x in contents.items()})
        return {name: np.concatenate([part[name] for part in parts])[:count] for name in self.records}

    def write_blocks(self, blocks: Sequence[int], contents: Any) -> None:
        """See `Runner.write_blocks`."""
        for begin in range(0, len(blocks), BLOCKS_PER_CALL):
            ids = self._pad_ids(blocks[begin : begin + BLOCKS_PER_CALL])
            end = min(begin + BLOCKS_PER_CALL, len(blocks))
            pad = BLOCKS_PER_CALL - (end - begin)
            part = jax.tree.map(
                lambda x, a=begin, b=end, n=pad: np.concatenate([x[a:b], np.zeros((n, *x.shape[1:]), x.dtype)]),
                contents,
            )
            self.cache = self.program.compile("serve_write")(self.cache, ids, part)

    def release_memory(self, level: int) -> None:
        """See `ReleasesMemory.release_memory`."""
        if level == 2 and self._source is None:
            raise RequestError(
                "the weights cannot be read again, because they did not come from a path or were updated\n    fix: use level 1"
            )
        if level == 1:
            arrays = dict(self.weights.read())
            self._host_weights = jax.tree.map(np.array, arrays), jax.tree.map(lambda x: x.sharding, arrays)
        # Other owners may share the weights, so drop the references instead of deleting the arrays.
        self.weights, self.cache = EngineWeights({}), None

    def restore_memory(self) -> None:
        """See `ReleasesMemory.restore_memory`."""
        if self._host_weights is not None:
            self.weights = EngineWeights(jax.device_put(*self._host_weights))
        else:
            assert self._source is not None
            self._place_weights(self._source())
        self.cache, self._host_weights = self.program.compile("serve_cache")(), None

    def update_weights(self, weights: ModelWeights, *, share: bool = False) -> int:
        """See `Runner.update_weights`."""
        copied = self._place_weights(weights, share=share)
        self._source = None
        return copied

    def _place_weights(self, weights: ModelWeights, *, share: bool = False) -> int:
        """Lay out weights for steps, and return the number of bytes that were copied."""
        weights = ModelWeights({**weights.params, **self._adapter_arrays}, weights.variables)
        self.weights = place_weights(self.program, weights, self.program.kept_weights if share else {}, share=share)
        return self.weights.copied_bytes

    def _set_adapters(self, weights: ModelWeights) -> None:
        """Read the adapters and check that they fit the model."""
        self._adapter_arrays: dict[str, np.ndarray] = {}
        self._exports: dict[str, Any] = {}
        if not self._slots:
            return
        functional, adapters = self.program.functional, read_adapters(self.cfg)
        adapters.check(weights.params)
        self._exports = dict(adapters.exported)
        self._adapter_arrays = adapters.arrays(functional.abstract)

    def read_adapter(self, name: str, directory: str) -> Any:
        """See `ChangesAdapters.read_adapter`."""
        from axlearn_plugins_finetune.lora.rows import check_slot, read_export

        if not self.cfg.adapter_slots:
            raise RequestError(
                "this runner was built without room for adapters\n    fix: set serving.runner.adapter_slots"
            )
        exported = read_export(name, directory)
        check_slot(name, exported, self.program.functional.abstract)
        if self._source is not None:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                exported.check_values(self._source(on_host=True).params)
        return exported

    def add_adapter(self, name: str, adapter: Any) -> None:
        """See `ChangesAdapters.add_adapter`."""
        if name in self._slots:
            raise RequestError(f"adapter {name} is loaded already\n    fix: unload it first, or choose another name")
        if None not in self._slots:
            raise RequestError(
                f"all {len(self._slots)} slots of adapters are in use\n"
                "    fix: unload an adapter, or raise serving.runner.adapter_slots"
            )
        self._slots[self._slots.index(None)] = name
        self._exports[name] = adapter
        self._write_adapters()

    def remove_adapter(self, name: str) -> None:
        """See `ChangesAdapters.remove_adapter`."""
        self._slots[self._slots.index(name)] = None
        del self._exports[name]
        self._write_adapters()

    def _write_adapters(self) -> None:
        """Write the adapters of all slots into the weights."""
        from axlearn_plugins_finetune.lora.rows import slot_arrays

        slots = [None if name is None else self._exports[name] for name in self._slots]
        self._adapter_arrays = slot_arrays(self.program.functional.abstract, slots)
        changed = self.program.compile("serve_adapters")(self._adapter_arrays)
        self.weights = attrs.evolve(self.weights, arrays={**self.weights.read(), **changed})

    def _adapter_number(self, adapter: str | None) -> int:
        """Return the number of an adapter in the tables; 0 is the base model."""
        return 0 if adapter is None else 1 + self._slots.index(adapter)

    def _pad_ids(self, blocks: Sequence[int]) -> np.ndarray:
        return np.asarray([*blocks, *[self.num_blocks] * (BLOCKS_PER_CALL - len(blocks))], np.int32)
