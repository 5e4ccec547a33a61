"""The functions that a runner compiles.

They compute steps with a paged cache and update the tables. `cache_functions` has those that move blocks of the cache.

Legend: R rows of one token, K chunks of C tokens, L = R + K, T = R + K C, D width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.compose import Array, Function
from axlearn_core.config.roles import states_role
from axlearn_core.config.tree import children
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_serving import token_sampling
from axlearn_plugins_serving.cache_functions import CacheFunctions
from axlearn_plugins_serving.prompt_extras import ChunkEmbeddings, PromptFunctions
from axlearn_plugins_serving.serving_linear import WeightLayout, lay_out_maps
from axlearn_plugins_serving.slot_tables import PLAIN_COLUMNS, assign_plain_rows
from axlearn_plugins_serving.step_inputs import (
    KIND,
    LOGPROBS,
    MASKED,
    SAMPLED,
    SAMPLING_LOGPROBS,
    TARGETS,
    VERIFIED,
    Step,
    StepBucket,
)
from axlearn_plugins_serving.text_embedding import EmbedBucket, Pooling, pool
from axlearn_plugins_serving.token_sampling import ChosenTokens, Tables
from axlearn_plugins_transformer.causal_lm import DraftsFromCache, DraftsTokens, NewTokens, splits_decoder
from axlearn_plugins_transformer.functions import Arrays, GenerationFunctions
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp
from axlearn_plugins_transformer.layer_roles import OutputHeadRole, SequentialRole
from axlearn_plugins_transformer.transformer import Cache

ADAPTERS = (".rows_a", ".rows_b")
"""Ends of the paths of the arrays that contain adapters."""
HEAD = "head"
"""Key of the output layer in models that tie it to the embedding. It is transposed once, so that its rows are contiguous."""


@attrs.frozen(kw_only=True)
class Sizes:
    """Sizes that all functions share.

    Attributes:
        blocks: Number of blocks in the cache.
        block_size: Tokens per block.
        slots: Maximum number of running requests.
        blocks_per_call: Number of blocks that one call copies, reads or writes.
        steps: Maximum number of tokens that `serve_decode` chooses.
        adapters: Number of adapters.
        min_rows: Minimum number of rows outside attention. Steps are padded to it, so that results do not depend on the number of
            rows.
        layout: Layout of the linear maps' weights; None keeps the training layout.
        snapshots: Number of recurrent states to keep for later requests, besides one per slot.
        stacked: Whether steps scan over the stacked arrays of the layers instead of reading separate ones.
        drafts: Whether steps draft tokens with the model's heads.
        pooling: Pooling of embeddings, or None.
        kept_tokens: Maximum number of tokens to report that could be drawn.
        extras: Whether prompts may have other inputs than tokens.
    """

    blocks: int
    block_size: int
    slots: int
    blocks_per_call: int
    steps: int
    adapters: int = 0
    min_rows: int = 1
    layout: WeightLayout | None = None
    snapshots: int = 0
    stacked: bool = False
    drafts: bool = False
    pooling: Pooling | None = None
    kept_tokens: int = 0
    extras: bool = False


class ServingFunctions:
    """The functions of a model with paged caches."""

    def __init__(self, model: Any, sizes: Sizes):
        """Build the functions of a model.

        `model` is a `CausalLM` with abstract arrays and paged caches.
        """
        self.sizes, self.vocab, decoder = sizes, model.vocab_size, model.decoder
        if sizes.drafts:
            _check_drafts(model)
        self._heads_keep_cache = sizes.drafts and isinstance(model, DraftsFromCache)
        options = {"heads": True} if self._heads_keep_cache else {}
        if sizes.stacked:
            _check_stacked(model, sizes)
        self._generation = GenerationFunctions(model, _layout_editor(sizes.layout), stacked=sizes.stacked, **options)
        self.prompts = PromptFunctions(self._generation) if sizes.extras else None
        head = children(decoder.cfg)["head"] if isinstance(decoder.cfg, OutputHeadRole) else None
        self._tied = head is None and not sizes.stacked
        self.specs: dict[str, Any] = dict(self._generation.specs)
        separate = self._generation.bind(self._generation.specs)
        spec = (separate.decoder.stacked_cache_spec(),) if sizes.stacked else separate.cache_spec()
        self._num_layers = len(spec)
        self._graph, self._state = nnx.split(model)
        self.cache_spec = (*spec, *separate.draft_cache_spec()) if self._heads_keep_cache else spec
        self._cache = CacheFunctions(
            self.cache_spec,
            blocks=sizes.blocks,
            requests=sizes.slots + sizes.snapshots,
            blocks_per_call=sizes.blocks_per_call,
        )

    def declare(self) -> Mapping[str, Function]:
        """Return the functions that create the inputs of steps, by name."""
        weights, tables = self._weight_arrays(), self._table_arrays()
        return {
            "serve_weights": Function(
                call=self._build_weights,
                outputs=lambda _: weights,
                runs_once=True,
                describe="weights of separate layers, as steps use them",
            ),
            "serve_layout": Function(
                call=self._build_changed_weights,
                outputs=lambda _: {path: array for path, array in weights.items() if path not in self.unchanged},
                runs_once=True,
                describe="the weights of separate layers that differ from the model's arrays",
            ),
            "serve_tables": Function(
                call=lambda: Tables.init(self.sizes.slots, self.vocab),
                outputs=lambda _: tables,
                takes_model=False,
                runs_once=True,
                describe="the tables of unassigned slots",
            ),
            **self._cache.declare(),
            **self._adapter_functions(weights),
        }

    def _adapter_functions(self, weights: Mapping[str, Array]) -> Mapping[str, Function]:
        rows = {path: Array(spec.shape, spec.dtype) for path, spec in self._flat_state() if path.endswith(ADAPTERS)}
        if not rows:
            return {}
        return {
            "serve_adapters": Function(
                call=self._build_adapters,
                inputs=lambda _: (rows,),
                outputs=lambda _: {path: array for path, array in weights.items() if path.endswith(ADAPTERS)},
                takes_model=False,
                runs_once=True,
                describe="adapters of separate layers, as steps use them",
            )
        }

    def _flat_state(self) -> Iterator[tuple[str, Any]]:
        """Yield the path and the array, which is abstract, of each variable of the model."""
        for key, variable in nnx.to_flat_state(self._state):
            yield ".".join(map(str, key)), variable.get_value()

    def _weight_arrays(self) -> dict[str, Array]:
        arrays = self._generation.declare()["unstack"].outputs
        assert arrays is not None
        weights: dict[str, Any] = dict(arrays(None))
        if self._tied:
            spec = jax.eval_shape(lambda a: self._generation.bind(a).decoder.head_weight(), self._generation.specs)
            weights[HEAD] = Array(spec.shape, spec.dtype, ("embed", "vocab"), "model (head)")
        return weights

    def _table_arrays(self) -> Any:
        return jax.tree.map(_array_spec, jax.eval_shape(lambda: Tables.init(self.sizes.slots, self.vocab)))

    def declare_steps(self, cache: Any) -> Mapping[str, Function]:
        """Return the step functions by name.

        `cache` is the output of `serve_cache`, abstract and with shardings.
        """
        weights, tables = self._weight_arrays(), self._table_arrays()
        return {
            **self._table_functions(tables),
            **self._step_functions(weights, tables, cache),
            **self._cache.declare_steps(cache),
        }

    def _table_functions(self, tables: Any) -> Mapping[str, Function]:
        return {
            "serve_assign": Function(
                call=_assign_row,
                inputs=lambda _: (tables, Array((), jnp.int32), jax.tree.map(_row_spec, tables)),
                outputs=lambda _: tables,
                donate=(0,),
                takes_model=False,
                describe="assign a slot to a request",
            ),
            "serve_assign_plain": Function(
                call=assign_plain_rows,
                inputs=lambda _: (tables, Array((self.sizes.slots, PLAIN_COLUMNS), jnp.int32)),
                outputs=lambda _: tables,
                donate=(0,),
                takes_model=False,
                describe="assign slots to plain requests",
            ),
            "serve_mask": Function(
                call=_write_masks,
                inputs=lambda _: (tables, Array((self.sizes.slots,), jnp.int32), tables.mask),
                outputs=lambda _: tables,
                donate=(0,),
                takes_model=False,
                describe="write masks into the tables",
            ),
        }

    def _step_functions(self, weights: Any, tables: Any, cache: Any) -> Mapping[str, Function]:
        pages = any(entry.per == "page" for entry in jax.tree.leaves(self.cache_spec))
        required = (PagedAttentionOp.name,) if pages else ()

        def inputs(bucket: StepBucket) -> tuple[Any, ...]:
            return weights, cache, tables, Array((bucket.length,), jnp.int32)

        def embeddings(bucket: StepBucket) -> ChunkEmbeddings | None:
            return None if self.prompts is None else self.prompts.chunk_embeddings(bucket)

        def texts(bucket: EmbedBucket) -> tuple[Any, ...]:
            per_row = Array((bucket.rows,), jnp.int32)
            return weights, Array((bucket.rows, bucket.length), jnp.int32), per_row, per_row

        return {
            "serve": Function(
                call=self.serve,
                inputs=lambda b: (*inputs(b), embeddings(b)),
                outputs=lambda _: (None, None, cache, tables),
                donate=(1, 2),
                takes_model=False,
                takes_bucket=True,
                required_kernels=required,
                describe="run one step and choose the next tokens",
            ),
            "serve_decode": Function(
                call=self.serve_decode,
                inputs=lambda b: (*inputs(b), Array((), jnp.int32)),
                outputs=lambda _: (None, cache, tables),
                donate=(1, 2),
                takes_model=False,
                takes_bucket=True,
                required_kernels=required,
                describe="run several decoding steps",
            ),
            "serve_embed": Function(
                call=self.serve_embed,
                inputs=texts,
                takes_model=False,
                takes_bucket=True,
                describe="compute the embeddings of texts",
            ),
            **({} if self.prompts is None else self.prompts.declare(weights)),
        }

    def _build_weights(self, model: Any) -> Arrays:
        flat = self._generation.separate_arrays(model)
        return {**flat, HEAD: model.decoder.head_weight()} if self._tied else flat

    def _build_changed_weights(self, model: Any) -> Arrays:
        return {path: array for path, array in self._build_weights(model).items() if path not in self.unchanged}

    @functools.cached_property
    def unchanged(self) -> Mapping[str, str]:
        """Path in a step -> path in the model, for each array that steps read as the model has it."""
        unchanged: dict[str, str] = {}

        def record(state: Any) -> None:
            sources = {id(v.get_value()): ".".join(map(str, key)) for key, v in nnx.to_flat_state(state)}
            arrays = self._build_weights(nnx.merge(self._graph, state))
            unchanged.update({path: sources[id(array)] for path, array in arrays.items() if id(array) in sources})

        jax.eval_shape(record, self._state)
        return unchanged

    def _build_adapters(self, rows: Mapping[str, jax.Array]) -> Arrays:
        """Return the adapters of separate layers. The other weights do not affect them, so they are zero here."""
        values = [
            (key, variable.replace(rows[path] if path in rows else jnp.zeros(spec.shape, spec.dtype)))
            for (key, variable), (path, spec) in zip(nnx.to_flat_state(self._state), self._flat_state(), strict=True)
        ]
        flat = self._generation.separate_arrays(nnx.merge(self._graph, nnx.from_flat_state(values)))
        return {path: array for path, array in flat.items() if path.endswith(ADAPTERS)}

    def _run_decoder(
        self, arrays: Arrays, cache: Any, tables: Tables, step: Step, embeddings: ChunkEmbeddings | None = None
    ) -> tuple[Any, jax.Array, Any, Context]:
        """Return the model, the decoder output before `finish` [T, D], the new cache and the context of the layers."""
        model = self._generation.bind(arrays)
        positions, real = step.positions()
        slots = step.slots(positions, real, self.sizes.blocks, self.sizes.block_size)
        rows = step.bucket.rows
        last = tables.last.at[step.slot[:rows]].get(mode="clip")
        tokens = jnp.concatenate([jnp.where(step.tokens[:rows] < 0, last, step.tokens[:rows]), step.tokens[rows:]])
        # Padding rows come last. They are not written to the cache, and attention skips them.
        tokens, positions = self._pad(tokens), self._pad(positions)
        slots = dataclasses.replace(slots, write=self._pad(slots.write, self.sizes.blocks * self.sizes.block_size))
        context = Context(positions=positions[:, None], slots=slots)  # type: ignore[arg-type]
        layers, heads = cache[: self._num_layers], cache[self._num_layers :]
        cache = Cache(layers[0] if self.sizes.stacked else layers, jnp.zeros((), jnp.int32))
        with self._select_adapters(tables, step.slot[step.row_indices()]):
            if splits_decoder(model):
                inputs, context, options = model.decoder_inputs({"tokens": tokens[:, None]}, context)
                if embeddings is not None:
                    options["embeddings"] = embeddings.replace(options["embeddings"], rows)
                x, new = model.decoder.begin(inputs, context, cache, **options)
            else:
                x, new = model.hidden_states({"tokens": tokens[:, None]}, context, cache)
        return model, x[:, 0], (*((new.layers,) if self.sizes.stacked else new.layers), *heads), context

    def _pad(self, x: jax.Array, value: int = 0) -> jax.Array:
        """Pad to `min_rows` rows."""
        missing = max(0, self.sizes.min_rows - x.shape[0])
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value) if missing else x

    def _select_adapters(self, tables: Tables, slots: jax.Array) -> AbstractContextManager[None]:
        """Return a context manager that selects the adapter of each token, given the tokens' slots."""
        return self._choose_adapters(tables.adapter.at[slots].get(mode="clip"))

    def _choose_adapters(self, number: jax.Array) -> AbstractContextManager[None]:
        """Return a context manager that selects the adapter of each token by its number, int32 [T]."""
        if not self.sizes.adapters:
            return nullcontext()
        from axlearn_plugins_finetune.lora.rows import row_adapters

        return row_adapters(jax.nn.one_hot(number - 1, self.sizes.adapters, dtype=jnp.float32))

    def _hidden(self, model: Any, tables: Tables, x: jax.Array, slots: jax.Array) -> jax.Array:
        """Compute the hidden states from the outputs of `_run_decoder`: [L, D] -> [L, 1, D]."""
        hidden = self._pad(x)[:, None]
        if splits_decoder(model):
            with self._select_adapters(tables, slots):
                hidden = model.decoder.finish(hidden)
        return hidden

    def _logits(self, model: Any, arrays: Arrays, tables: Tables, x: jax.Array, slots: jax.Array) -> jax.Array:
        """Compute the logits from the outputs of `_run_decoder`."""
        hidden = self._hidden(model, tables, x, slots)
        logits = model.logits(hidden, arrays.get(HEAD))[:, 0].astype(jnp.float32)
        return constrain(logits, None, None)  # replicated, because choosing a token loops over sums of logits

    def _choose_tokens(self, logits: jax.Array, tables: Tables, step: Step) -> tuple[ChosenTokens, Tables]:
        slot, flags, kind = self._pad(step.slot, self.sizes.slots), self._pad(step.flags), step.header[KIND]
        scored = step.header[SAMPLING_LOGPROBS] > 0
        width = self.sizes.kept_tokens
        drawn = token_sampling.choose(logits, tables, slot, flags & MASKED > 0, kind, scored, width)
        tables = token_sampling.record(tables, slot, drawn.token, flags & SAMPLED > 0, kind)
        chosen = token_sampling.report(logits, drawn.token, step.header[LOGPROBS])
        chosen = chosen._replace(sampling_logprob=drawn.logprob, kept=drawn.kept)
        return jax.tree.map(lambda x: x[: step.bucket.results], chosen), tables

    def serve(
        self,
        arrays: Arrays,
        cache: Any,
        tables: Tables,
        packed: jax.Array,
        embeddings: ChunkEmbeddings | None,
        bucket: StepBucket,
    ) -> tuple[ChosenTokens, ChosenTokens | None, Any, Tables]:
        """Run one step, in which `embeddings` may replace the embeddings of tokens in chunks.

        Return the choices [L], log-probabilities of targets [K C], the new cache and the new tables.
        """
        step = bucket.unpack(packed)
        model, x, cache, context = self._run_decoder(arrays, cache, tables, step, embeddings)
        targets = (
            self._score_targets(model, arrays, tables, x[bucket.rows : bucket.tokens], step) if bucket.chunks else None
        )
        logits = self._logits(model, arrays, tables, x[step.last_indices()], step.slot)
        sampled, tables = self._choose_tokens(logits, tables, step)
        if self.sizes.drafts:
            places, tokens = self._accepted(step, sampled.token, targets)
            if self._heads_keep_cache:
                drafts, heads = self._draft_from_cache(
                    model, arrays, tables, x, step, places, tokens, context, cache[self._num_layers :]
                )
                cache = (*cache[: self._num_layers], *heads)
            else:
                hidden = self._hidden(model, tables, x[places], step.slot)
                drafts = model.draft(hidden, self._pad(tokens))
            sampled = sampled._replace(drafts=drafts[: step.bucket.results].astype(jnp.int32))
        return sampled, targets, cache, tables

    def _draft_from_cache(
        self,
        model: Any,
        arrays: Arrays,
        tables: Tables,
        x: jax.Array,
        step: Step,
        places: jax.Array,
        tokens: jax.Array,
        context: Context,
        cache: tuple[Any, ...],
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Return the tokens that the model drafts after each row's last accepted token, int32 [L, K], and the heads' caches.

        Args:
            model: The model.
            arrays: Weights.
            tables: The tables.
            x: Outputs of `_run_decoder`, [T, D].
            step: The step.
            places: Index of each row's last accepted token, int32 [L].
            tokens: Tokens after them, int32 [L].
            context: Context of the layers.
            cache: Caches of the heads.
        """
        rows, indices = step.row_indices(), jnp.arange(step.bucket.tokens, dtype=jnp.int32)
        # The targets of a prompt are its own tokens, unless the row chooses the token after it.
        following = jnp.concatenate([tokens[: step.bucket.rows], step.targets.reshape(-1)])
        following = following.at[places].set(jnp.where(step.flags & SAMPLED > 0, tokens, following[places]))
        successors = jnp.where(indices < places[rows], indices + 1, x.shape[0])
        new = NewTokens(self._pad(following), self._pad(successors, x.shape[0]), self._pad(rows), places)
        slots = step.slot[rows]
        hidden = self._hidden(model, tables, x, slots)
        with self._select_adapters(tables, slots):
            return model.draft_from_cache(hidden, new, context, cache, arrays.get(HEAD))

    @staticmethod
    def _accepted(step: Step, chosen: jax.Array, targets: ChosenTokens | None) -> tuple[jax.Array, jax.Array]:
        """Return the index of each row's last accepted token, int32 [L], and the token after it, int32 [L].

        Args:
            step: The step.
            chosen: Token after the last token of each row, int32 [L].
            targets: Log-probabilities of the targets in chunks, if the step has chunks.
        """
        places, tokens, rows = step.last_indices(), chosen, step.bucket.rows
        if targets is not None:  # after a rejected draft, continue with the token that the model prefers to it
            best = targets.top_tokens[:, 0].reshape(step.targets.shape)
            offsets = jnp.arange(step.bucket.chunk, dtype=jnp.int32)[None]
            is_accepted = (best == step.targets) & (offsets < step.count[rows:, None] - 1)
            accepted = jnp.sum(jnp.cumprod(is_accepted.astype(jnp.int32), axis=1), axis=1)
            rejects = (step.flags[rows:] & VERIFIED > 0) & (accepted < step.count[rows:] - 1)
            first = rows + step.bucket.chunk * jnp.arange(step.bucket.chunks, dtype=jnp.int32)
            preferred = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
            places = places.at[rows:].set(jnp.where(rejects, first + accepted, places[rows:]))
            tokens = tokens.at[rows:].set(jnp.where(rejects, preferred, tokens[rows:]))
        return places, tokens

    def _score_targets(self, model: Any, arrays: Arrays, tables: Tables, x: jax.Array, step: Step) -> ChosenTokens:
        """Return the log-probabilities of the targets, computed one chunk at a time."""
        needed = step.header[TARGETS] > 0
        rows, chunks, top = step.bucket.rows, step.bucket.chunks, min(token_sampling.TOP, self.vocab)

        def part(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> ChosenTokens:
            x, targets, slot = chunk
            logits = self._logits(model, arrays, tables, x, jnp.broadcast_to(slot, targets.shape))
            scores = token_sampling.report(logits, self._pad(targets), jnp.int32(token_sampling.TOP_LOGPROBS))
            return jax.tree.map(lambda y: y[: targets.shape[0]], scores)

        def compute(_: Any) -> ChosenTokens:
            scores = lax.map(part, (x.reshape(chunks, -1, x.shape[-1]), step.targets, step.slot[rows:]))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scores)

        def nothing(_: Any) -> ChosenTokens:
            real = jnp.zeros((x.shape[0], top), jnp.float32)
            return ChosenTokens(step.targets.reshape(-1), real[:, 0], jnp.zeros(real.shape, jnp.int32), real)

        return lax.cond(needed, compute, nothing, None)

    def serve_decode(
        self, arrays: Arrays, cache: Any, tables: Tables, packed: jax.Array, count: jax.Array, bucket: StepBucket
    ) -> tuple[ChosenTokens, Any, Tables]:
        """Run `count` steps of one token per row.

        Return the choices [steps, R], the new cache and the new tables.
        """
        step = bucket.unpack(packed)
        empty = jax.eval_shape(functools.partial(self.serve, bucket=bucket), arrays, cache, tables, packed, None)[0]
        empty = empty._replace(drafts=None)
        results = jax.tree.map(lambda s: jnp.zeros((self.sizes.steps, *s.shape), s.dtype), empty)

        def one(index: jax.Array, state: Any) -> Any:
            results, cache, tables = state
            substep = step.substep(index, self.sizes.block_size)
            model, x, cache, _ = self._run_decoder(arrays, cache, tables, substep)
            logits = self._logits(model, arrays, tables, x[substep.last_indices()], substep.slot)
            sampled, tables = self._choose_tokens(logits, tables, substep)
            return jax.tree.map(lambda all, x: all.at[index].set(x), results, sampled), cache, tables

        return lax.fori_loop(0, count, one, (results, cache, tables))

    def serve_embed(
        self, arrays: Arrays, tokens: jax.Array, lengths: jax.Array, adapters: jax.Array, bucket: EmbedBucket
    ) -> jax.Array:
        """Return the embeddings of texts, float32 [B, D], computed without the cache.

        Args:
            arrays: Weights.
            tokens: int32 [B, S].
            lengths: Number of tokens in each row, int32 [B].
            adapters: Adapter of each row, counted from 1; 0 is the base model, int32 [B].
            bucket: Shapes.
        """
        assert self.sizes.pooling is not None
        model = self._generation.bind(arrays)
        real = jnp.arange(bucket.length, dtype=jnp.int32)[None] < lengths[:, None]
        with self._choose_adapters(jnp.repeat(adapters, bucket.length)):
            hidden, _ = model.hidden_states({"tokens": tokens}, Context(real=real))
        return pool(hidden, lengths, self.sizes.pooling)


def _check_stacked(model: Any, sizes: Sizes) -> None:
    """Raise `RequestError` if steps cannot scan over the stacked weights of a model."""
    reasons, stack = [], model.decoder.cfg.stack
    if not isinstance(model.decoder, StacksCache) or not states_role(stack, SequentialRole):
        reasons.append(f"its decoder, a {type(model.decoder).__name__}, does not run as a scan with a cache")
    if sizes.drafts:
        reasons.append("steps draft tokens with its heads")
    if sizes.layout == "column_parallel":
        reasons.append("the mode parity splits the outputs of each weight over devices")
    if reasons:
        raise RequestError(
            f"steps cannot read the stacked weights of this model: {reasons[0]}\n    got: serving.runner.layers=stacked\n"
            "    fix: set serving.runner.layers=separate"
        )


def _check_drafts(model: object) -> None:
    """Raise `RequestError` if the model has no heads that draft tokens."""
    if not isinstance(model, DraftsTokens | DraftsFromCache):
        raise RequestError(
            f"{type(model).__name__} cannot draft tokens: it has no method `draft`\n"
            "    got: serving.drafter=model-drafter\n"
            "    fix: set serving.drafter=ngram-drafter or null, train the model with the feature multi-token-prediction, or see "
            f"`DraftsTokens` in {DraftsTokens.__module__}"
        )


@runtime_checkable
class StacksCache(Protocol):
    """A decoder whose layers can run as a scan with a cache."""

    def stacked_cache_spec(self) -> Any:
        """Return a `StackedCache` of the entries of the cache."""
        ...


@runtime_checkable
class _SupportsWholeHeads(Protocol):
    """A rotary embedding that supports cosines and sines for whole heads.

    The cosines and sines are then computed once for all layers.
    """

    whole_heads: bool


def _layout_editor(layout: WeightLayout | None) -> Callable[[Any], None]:
    """Return a function that edits a model's weight layout.

    The model must have separate layers.
    """

    def edit(model: Any) -> None:
        if layout is not None:
            lay_out_maps(model, layout)
        if layout == "transposed":
            for _, module in nnx.iter_modules(model):
                if isinstance(module, _SupportsWholeHeads):
                    module.whole_heads = True

    return edit


def _assign_row(tables: Tables, slot: jax.Array, row: Tables) -> Tables:
    return jax.tree.map(lambda x, new: x.at[slot].set(new), tables, row)


def _write_masks(tables: Tables, slots: jax.Array, masks: jax.Array) -> Tables:
    return dataclasses.replace(tables, mask=tables.mask.at[slots].set(masks, mode="drop"))


def _array_spec(spec: Any) -> Array:
    return Array(spec.shape, spec.dtype)


def _row_spec(spec: Array) -> Array:
    return Array(spec.shape[1:], spec.dtype)
