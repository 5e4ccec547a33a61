"""`ModelRunner`: compute a model's steps with a cache of blocks.

It compiles its functions before the first request.

`RunnerProgram` contains these functions. It also works without a runner: a plan compiles it for devices that are not present.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import jax
import numpy as np

from axlearn_core.compose import Function, Functional, ModelWeights, Program
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Configurable, Node, find, node, setting
from axlearn_core.config.tree import find_slots
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import Problem, RequestError
from axlearn_core.run.notices import log_message
from axlearn_plugins_serving.contracts import Row, Sampling, SubmittedStep
from axlearn_plugins_serving.engine_weights import EngineWeights, KeptArray, model_weights, place_weights
from axlearn_plugins_serving.functions import ServingFunctions, Sizes
from axlearn_plugins_serving.memory_errors import SMALLER_CACHE, SMALLER_WEIGHTS, explain_memory
from axlearn_plugins_serving.packing import Packer, PendingStep
from axlearn_plugins_serving.paged_cache_feature import UsePagedCache
from axlearn_plugins_serving.parity import check_parity, min_rows
from axlearn_plugins_serving.programs import BackgroundLoader, Shapes, identity, list_functions, load_programs
from axlearn_plugins_serving.serving_linear import WeightLayout, choose_layout, describe_kept_layouts
from axlearn_plugins_serving.slot_tables import SlotTables
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_serving.text_embedding import EmbedBucket, PendingTexts, Pooling, embed_buckets, pack_texts
from axlearn_plugins_serving.token_records import list_records
from axlearn_plugins_serving.token_sampling import MAX_BIAS
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache
from axlearn_plugins_transformer.batch_invariant import with_invariant_kernels
from axlearn_plugins_transformer.cache_spec import has_states, read_prefix, read_window
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_plugins_transformer.layer_roles import RecurrentRole

if TYPE_CHECKING:
    from axlearn_plugins_finetune.lora.rows import RowAdapters

BLOCKS_PER_CALL = 16
"""Number of blocks that one call copies, reads or writes."""
SETUP_FUNCTIONS = ("serve_tables", "serve_cache", "serve_weights")
"""Functions that create the inputs of steps."""


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
    class Config(Configurable.Config["ModelRunner"]):
        """The sizes that determine the shapes of steps.

        Each step uses the smallest of these shapes that fits its rows.

        Attributes:
            block_size: Tokens per block.
            num_blocks: Number of blocks in the cache; None allocates enough for `max_rows` requests of `max_context` tokens.
            max_rows: Maximum number of running requests.
            max_context: Maximum number of tokens in a request, including its output. The default is 2,048, or the model's
                own context length if that is smaller.
            beyond_context: Whether to allow a longer context than the model's own, which makes RoPE extrapolate.
            max_step_tokens: Maximum number of prompt tokens in a step, rounded up to whole chunks.
            chunk: Prompt tokens computed as one row of a step. A prompt uses as many rows as it needs.
            row_buckets: Numbers of decoding requests to compile steps for; `max_rows` is always included.
            chunk_buckets: Numbers of chunks to compile steps for; the number for `max_step_tokens` is always included. Steps
                without decoding requests are compiled only for the smallest and the largest number.
            decode_steps: Maximum number of tokens to decode in one dispatch.
            mode: `fast`, or `parity` for results that match the training program in its batch-invariant mode bit for bit.
            layers: `separate` gives steps a weight per layer, in the layout that the processor reads fastest. `stacked` lets steps
                scan over the arrays of training, so that weights of a training program in the same process are not copied.
            cache_dtype: Storage dtype of cached keys and values, with a scale per token and head. None uses the model's dtype.
            adapters: Name -> directory written by `axlearn lora export`. Requests select an adapter by name.
            adapter_slots: Number of adapters that can be added later, in addition to `adapters`.
            adapter_rank: Largest rank of adapters that are added later.
            adapter_targets: Patterns of the paths of linear maps that adapters that are added later may change.
            kernel: Kernel for the `paged_attention` op; None picks the best kernel for the mode.
            num_snapshots: Number of recurrent states to keep for later requests, if the model has recurrent layers. None keeps two
                per running request.
            drafts: Whether each step drafts tokens with the model's heads. The `model-drafter` turns it on.
            pooling: Pooling of hidden states to embeddings: `mean`, `last` or `cls` (the first token). None uses the pooling of the
                model's files, and computes no embeddings if they have none. `off` turns embeddings off.
            kept_tokens: Maximum number of tokens to report with `sampling_logprobs` that top-k, top-p and min-p kept.
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
        layers: Literal["separate", "stacked"] = "separate"
        cache_dtype: Literal["int8", "float8_e4m3fn"] | None = None
        adapters: Mapping[str, str] = {}
        adapter_slots: int = setting(default=0, ge=0, le=256)
        adapter_rank: int = setting(default=16, ge=1)
        adapter_targets: tuple[str, ...] = ("**.attention.*",)
        kernel: str | None = None
        num_snapshots: int | None = setting(default=None, ge=0)
        drafts: bool = False
        pooling: Literal["mean", "last", "cls", "off"] | None = None
        kept_tokens: int = setting(default=0, ge=0, le=2**14, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Report invalid buckets, and caches that hold too many tokens."""
            yield from super().validate()
            most = 2**31 // max(1, self.block_size) - 1
            if self.total_blocks > most:
                yield Problem(
                    path="num_blocks",
                    message="a step counts cached tokens in 32 bits, so the cache has too many blocks",
                    got=str(self.total_blocks),
                    expected=f"at most {most}",
                )
            for name in ("row_buckets", "chunk_buckets"):
                if any(size < 1 for size in getattr(self, name)):
                    yield Problem(
                        path=name,
                        message="bucket sizes must be positive",
                        got=str(getattr(self, name)),
                        expected="at least 1 each",
                    )

        @property
        def blocks_per_request(self) -> int:
            """Maximum number of blocks per request."""
            return -(-self.max_context // max(1, self.block_size))

        @property
        def total_blocks(self) -> int:
            """Number of blocks in the cache."""
            return self.num_blocks or self.max_rows * self.blocks_per_request

        @property
        def total_snapshots(self) -> int:
            """Number of recurrent states to keep for later requests."""
            return 2 * self.max_rows if self.num_snapshots is None else self.num_snapshots

        @property
        def embed_pooling(self) -> Pooling | None:
            """Pooling of embeddings, or None if the runner computes none."""
            return None if self.pooling == "off" else self.pooling

        @property
        def embed_buckets(self) -> list[EmbedBucket]:
            """The shapes of batches of texts to embed, in ascending order of length."""
            return [] if self.embed_pooling is None else embed_buckets(self.max_context, self.max_step_tokens)

        def buckets(self, *, states: bool = False) -> list[StepBucket]:
            """Return the shapes of steps, in ascending order. `states` is set for models with recurrent layers."""
            rows = sorted({min(n, self.max_rows) for n in (*self.row_buckets, self.max_rows)})
            most = -(-self.max_step_tokens // self.chunk)
            chunks = sorted({min(n, most) for n in (*self.chunk_buckets, most)})

            def bucket(rows: int, chunks: int) -> StepBucket:
                return StepBucket(rows, chunks, self.chunk, self.blocks_per_request, states)

            prompt_only = [bucket(0, k) for k in sorted({chunks[0], most})]
            return [*[bucket(n, 0) for n in rows], *prompt_only, *[bucket(rows[-1], k) for k in chunks]]

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
        self._packer = Packer(self.buckets, self.max_rows)

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
        return sum(not self.program.exported(*function) for function in self.program.compiled)

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
        for bucket, packed in calls:
            state = self.weights.read(), self.cache, self._tables.arrays, packed
            if steps > 1:
                sampled, self.cache, self._tables.arrays = self.program.compile("serve_decode", bucket)(
                    *state, np.int32(steps)
                )
                results.append((sampled, None))
            else:
                sampled, targets, self.cache, self._tables.arrays = self.program.compile("serve", bucket)(*state)
                results.append((sampled, targets))
        return PendingStep(rows, options, places, results, steps)

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


class RunnerProgram(ModelProgram):
    """The functions of a runner, for devices that need not be present.

    Steps are declared after the cache.

    Attributes:
        cfg: Config of the runner.
        model: Config of the model, without the caches and adapters that the runner adds.
        buckets: Shapes of steps, in ascending order.
    """

    def __init__(
        self,
        cfg: ModelRunner.Config,
        model: Node[Any],
        devices: Sequence[Any],
        mesh: Mesh | None = None,
        target: Target | None = None,
    ):
        """Build the program.

        `model` is the config of a `CausalLM`; see `ModelProgram` for the other arguments.
        """
        self.cfg, self.model = cfg, model
        parity, on_cpu = cfg.mode == "parity", devices[0].platform == "cpu"
        has_adapters = bool(cfg.adapters or cfg.adapter_slots)
        self._weight_layout: WeightLayout | None = choose_layout(
            model, devices, parity=parity, has_adapters=has_adapters, stacked=cfg.layers == "stacked"
        )
        cache = UsePagedCache(
            page_size=cfg.block_size,
            heads_first=on_cpu,
            store=cfg.cache_dtype,
            expand_latents=parity,
            kernel=cfg.kernel,
        )
        # A model without attention has no cache of tokens.
        has_attention = find_slots(model, KVCache) or find_slots(model, LatentCache)
        served = model if find(model, RecurrentRole) and not has_attention else cache.apply(model)
        if has_adapters:
            served = read_adapters(cfg).apply(served)
        if parity:
            served = with_invariant_kernels(served)
        super().__init__(Functional.from_config(served), devices, mesh, target, self._declare)
        self.buckets = cfg.buckets(states=has_states(self.cache_spec))
        if (prefix := read_prefix(self.cache_spec)) > cfg.chunk:
            raise RequestError(
                f"a chunk cannot contain the prefix, whose tokens attend to each other in both directions\n"
                f"    got: runner.chunk={cfg.chunk}, and a prefix of {prefix} tokens\n    expected: at least {prefix}\n"
                f"    fix: set serving.runner.chunk={prefix}"
            )

    @classmethod
    def for_program(
        cls, program: Program | ModelProgram | None, cfg: ModelRunner.Config, model: Any
    ) -> "RunnerProgram":
        """Build the program on the devices of `program`, or on one device if it is None."""
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
        """Build the program with all its functions.

        This allocates nothing on the devices.
        """
        program = cls(cfg, model, devices, mesh, target)
        shapes, places = program.trace("serve_cache").out_info, program.compile("serve_cache").output_shardings
        program.declare_steps(
            jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
        )
        return program

    @property
    def cache_spec(self) -> Any:
        """The entries of each layer's cache; see `axlearn_plugins_transformer.cache_spec`."""
        return self._serving.cache_spec

    @property
    def records(self) -> tuple[str, ...]:
        """Names of the records that the layers keep in their caches."""
        return list_records(self.cache_spec)

    @property
    def kept_weights(self) -> Mapping[str, KeptArray]:
        """The arrays that steps read as the model has them, by the path that steps use."""
        steps = self.arguments("serve", self.buckets[0])[0]
        return {path: KeptArray(source, steps[path].sharding) for path, source in self._serving.unchanged.items()}

    @property
    def configs(self) -> Mapping[str, Node[Any]]:
        """The configs that determine the functions."""
        return {"model": self.model, "runner": self.cfg}

    def _declare(self, model: Any) -> Mapping[str, Function]:
        cfg = self.cfg
        sizes = Sizes(
            blocks=cfg.total_blocks,
            block_size=cfg.block_size,
            slots=cfg.max_rows,
            blocks_per_call=BLOCKS_PER_CALL,
            steps=cfg.decode_steps,
            adapters=len(cfg.adapters) + cfg.adapter_slots,
            min_rows=min_rows(model) if cfg.mode == "parity" else 1,
            layout=self._weight_layout,
            snapshots=cfg.total_snapshots,
            stacked=cfg.layers == "stacked",
            drafts=cfg.drafts,
            pooling=cfg.embed_pooling,
            kept_tokens=cfg.kept_tokens,
        )
        self._serving = ServingFunctions(model, sizes)
        return self._serving.declare()

    def declare_steps(self, cache: Any) -> None:
        """Declare the steps.

        `cache` is the output of `serve_cache`: arrays, or abstract arrays with shardings.
        """
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        self.functions.update(self._serving.declare_steps(specs))

    def step_shapes(self) -> Shapes:
        """Return the shapes of all functions that steps may need."""
        moves = ("serve_assign", "serve_assign_plain", "serve_mask", "serve_copy", "serve_read", "serve_write")
        moves = (*moves, "serve_records") if self.records else moves
        shapes: dict[str, Sequence[Any]] = {**{name: [None] for name in moves}, "serve": self.buckets}
        if self.cfg.adapter_slots:
            shapes["serve_adapters"] = [None]
        if self.cfg.embed_pooling is not None:
            shapes["serve_embed"] = self.cfg.embed_buckets
        if self.cfg.decode_steps > 1:
            shapes["serve_decode"] = [bucket for bucket in self.buckets if not bucket.chunks]
        return shapes

    def shapes(self) -> Shapes:
        """Return the shapes of all the runner's functions."""
        return {**{name: [None] for name in SETUP_FUNCTIONS}, **self.step_shapes()}

    def notes(self) -> tuple[str, ...]:
        """Return notes about linear maps that keep the training weight layout.

        There are none if all maps keep it.
        """
        return () if self._weight_layout is None else describe_kept_layouts(self.functional.describe())

    def export_all(self, directory: Path) -> None:
        """Compile all functions and write them to a new directory.

        Raises:
            RequestError: If the directory exists or a function cannot be written.
        """
        self.export(directory, self.shapes(), identity(self, self.configs))


def read_adapters(cfg: ModelRunner.Config) -> "RowAdapters":
    """Read the adapters of a runner's config, and its room for other adapters.

    Raises:
        RequestError: If the adapter plugin is not installed or the adapters cannot be selected per row.
        CheckpointError: If a directory has no adapter.
    """
    try:
        from axlearn_plugins_finetune.lora.rows import FreeSlots, RowAdapters
    except ImportError as error:
        raise RequestError(
            f"adapters need a plugin that is not installed: {error}\n    fix: pip install axlearn-plugins-finetune"
        ) from error
    free = FreeSlots(cfg.adapter_slots, cfg.adapter_rank, cfg.adapter_targets)
    return RowAdapters.read(cfg.adapters, free)
