"""What a runner compiles: steps over a paged cache, and what goes on between them.

Legend: R rows of one token, K chunks of C tokens, L = R + K, T = R + K C, D width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.compose import Array, Function
from axlearn_core.config.tree import children
from axlearn_core.nn.layer import Context
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_serving import token_sampling
from axlearn_plugins_serving.serving_linear import WeightLayout, lay_out_maps
from axlearn_plugins_serving.step_inputs import KIND, LOGPROBS, MASKED, SAMPLED, TARGETS, Step, StepBucket
from axlearn_plugins_serving.token_sampling import Chosen, Tables
from axlearn_plugins_transformer.causal_lm import TwoPartDecoder
from axlearn_plugins_transformer.functions import Arrays, GenerationFunctions
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp
from axlearn_plugins_transformer.layer_roles import OutputHeadRole
from axlearn_plugins_transformer.transformer import Cache

HEAD = "head"
"""The output layer of a model that ties it to its embedding, transposed once: rows of it are contiguous."""


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes that all functions share.

    Attributes:
        blocks: of the cache.
        block_size: tokens of each.
        slots: A.
        moved: blocks that are copied, read or written at once.
        steps: tokens that `serve_decode` chooses at most.
        adapters: that rows choose from.
        least: rows of everything but attention at least, so that rows do not depend on their number.
        layout: of the weights of linear maps; None leaves them as training has them.
    """

    blocks: int
    block_size: int
    slots: int
    moved: int
    steps: int
    adapters: int = 0
    least: int = 1
    layout: WeightLayout | None = None


class ServingFunctions:
    """The functions of one model with paged caches."""

    def __init__(self, model: Any, sizes: Sizes):
        """`model`: a `CausalLM` with abstract arrays, whose caches are paged."""
        self.sizes, self.vocab = sizes, model.vocab_size
        self._generation = GenerationFunctions(model, _lay_out(sizes.layout))
        decoder = model.decoder
        head = children(decoder.cfg)["head"] if isinstance(decoder.cfg, OutputHeadRole) else None
        self._tied = head is None
        self.specs: dict[str, Any] = dict(self._generation.specs)
        self._like: Any = None

    def declare(self) -> Mapping[str, Function]:
        """Those that make what steps work on, by name."""
        weights, tables = self._weight_arrays(), self._table_arrays()
        return {
            "serve_weights": Function(
                call=self._weights,
                outputs=lambda _: weights,
                runs_once=True,
                describe="the weights with separate layers, as steps take them",
            ),
            "serve_cache": Function(
                call=self._cache, of_model=False, runs_once=True, describe="an empty cache of all blocks"
            ),
            "serve_tables": Function(
                call=lambda: Tables.init(self.sizes.slots, self.vocab),
                outputs=lambda _: tables,
                of_model=False,
                runs_once=True,
                describe="the tables of all slots, which nobody has",
            ),
        }

    def _weight_arrays(self) -> dict[str, Array]:
        arrays = self._generation.declare()["unstack"].outputs
        assert arrays is not None
        weights: dict[str, Any] = dict(arrays(None))
        if self._tied:
            spec = jax.eval_shape(lambda a: self._generation.bind(a).decoder.head_weight(), self._generation.specs)
            weights[HEAD] = Array(spec.shape, spec.dtype, ("embed", "vocab"), "model (head)")
        return weights

    def _table_arrays(self) -> Any:
        return jax.tree.map(_whole_array, jax.eval_shape(lambda: Tables.init(self.sizes.slots, self.vocab)))

    def declare_steps(self, cache: Any) -> Mapping[str, Function]:
        """The steps, by name; `cache` is what `serve_cache` gives, as abstract arrays with their shardings."""
        weights, tables = self._weight_arrays(), self._table_arrays()
        return {**self._table_functions(tables), **self._step_functions(weights, tables, cache), **self._moves(cache)}

    def _table_functions(self, tables: Any) -> Mapping[str, Function]:
        return {
            "serve_assign": Function(
                call=_assign,
                inputs=lambda _: (tables, Array((), jnp.int32), jax.tree.map(_row, tables)),
                outputs=lambda _: tables,
                donate=(0,),
                of_model=False,
                describe="a request into the tables",
            ),
            "serve_mask": Function(
                call=_put_masks,
                inputs=lambda _: (tables, Array((self.sizes.slots,), jnp.int32), tables.mask),
                outputs=lambda _: tables,
                donate=(0,),
                of_model=False,
                describe="masks into the tables",
            ),
        }

    def _step_functions(self, weights: Any, tables: Any, cache: Any) -> Mapping[str, Function]:
        def inputs(bucket: StepBucket) -> tuple[Any, ...]:
            return weights, cache, tables, Array((bucket.length,), jnp.int32)

        return {
            "serve": Function(
                call=self.serve,
                inputs=inputs,
                outputs=lambda _: (None, None, cache, tables),
                donate=(1, 2),
                of_model=False,
                by_bucket=True,
                required_kernels=(PagedAttentionOp.name,),
                describe="a step: tokens of requests into the cache, and the tokens that follow",
            ),
            "serve_decode": Function(
                call=self.serve_decode,
                inputs=lambda b: (*inputs(b), Array((), jnp.int32)),
                outputs=lambda _: (None, cache, tables),
                donate=(1, 2),
                of_model=False,
                by_bucket=True,
                required_kernels=(PagedAttentionOp.name,),
                describe="several steps of one token for each request",
            ),
        }

    def _moves(self, cache: Any) -> Mapping[str, Function]:
        ids = Array((self.sizes.moved,), jnp.int32)
        some = jax.tree.map(lambda s: Array((self.sizes.moved, *s.shape[1:]), s.dtype), cache)
        return {
            "serve_copy": Function(
                call=lambda cache, source, target: jax.tree.map(
                    lambda x: x.at[target].set(x.at[source].get(mode="clip"), mode="drop"), cache
                ),
                inputs=lambda _: (cache, ids, ids),
                outputs=lambda _: cache,
                donate=(0,),
                of_model=False,
                describe="blocks of the cache into others",
            ),
            "serve_read": Function(
                call=lambda cache, source: jax.tree.map(lambda x: x.at[source].get(mode="clip"), cache),
                inputs=lambda _: (cache, ids),
                of_model=False,
                describe="the contents of blocks",
            ),
            "serve_write": Function(
                call=lambda cache, target, contents: jax.tree.map(
                    lambda x, new: x.at[target].set(new, mode="drop"), cache, contents
                ),
                inputs=lambda _: (cache, ids, some),
                outputs=lambda _: cache,
                donate=(0,),
                of_model=False,
                describe="contents into blocks",
            ),
        }

    def _weights(self, model: Any) -> Arrays:
        flat = self._generation.separate_arrays(model)
        return {**flat, HEAD: model.decoder.head_weight()} if self._tied else flat

    def _cache(self) -> Any:
        model = self._generation.bind(self._generation.specs)
        return model.init_cache(1, self.sizes.blocks * self.sizes.block_size).layers

    def _run(self, arrays: Arrays, cache: Any, tables: Tables, step: Step) -> tuple[Any, jax.Array, Any]:
        """(the model, what its decoder has still to finish [T, D], the new cache)."""
        model = self._generation.bind(arrays)
        positions, real = step.positions()
        slots = step.slots(positions, real, self.sizes.blocks, self.sizes.block_size)
        rows = step.bucket.rows
        last = tables.last.at[step.slot[:rows]].get(mode="clip")
        tokens = jnp.concatenate([jnp.where(step.tokens[:rows] < 0, last, step.tokens[:rows]), step.tokens[rows:]])
        # Rows that no request has stand behind the others: they are written nowhere, and attention leaves them out.
        tokens, positions = self._pad(tokens), self._pad(positions)
        slots = dataclasses.replace(slots, write=self._pad(slots.write, self.sizes.blocks * self.sizes.block_size))
        context = Context(positions=positions[:, None], slots=slots)  # type: ignore[arg-type]
        run = model.decoder.begin if isinstance(model.decoder, TwoPartDecoder) else model.decoder
        with self._adapters(tables, step.slot[step.owners()]):
            x, new = run(tokens[:, None], context, Cache(cache, jnp.zeros((), jnp.int32)))
        return model, x[:, 0], new.layers

    def _pad(self, x: jax.Array, value: int = 0) -> jax.Array:
        """With `least` rows, where it has fewer."""
        missing = max(0, self.sizes.least - x.shape[0])
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value) if missing else x

    def _adapters(self, tables: Tables, slots: jax.Array) -> AbstractContextManager[None]:
        """The choice of adapters for tokens of these slots."""
        if not self.sizes.adapters:
            return nullcontext()
        from axlearn_plugins_finetune.lora.rows import row_adapters

        number = tables.adapter.at[slots].get(mode="clip")
        return row_adapters(jax.nn.one_hot(number - 1, self.sizes.adapters, dtype=jnp.float32))

    def _logits(self, model: Any, arrays: Arrays, tables: Tables, x: jax.Array, slots: jax.Array) -> jax.Array:
        """[L, D] as `_run` leaves them, of slots [L] -> float32 [L or `least`, V]."""
        hidden = self._pad(x)[:, None]
        if isinstance(model.decoder, TwoPartDecoder):
            with self._adapters(tables, slots):
                hidden = model.decoder.finish(hidden)
        logits = model.logits(hidden, arrays.get(HEAD))[:, 0].astype(jnp.float32)
        return constrain(logits, None, None)  # whole on every device: choosing a token loops over sums of them

    def _choose(self, logits: jax.Array, tables: Tables, step: Step) -> tuple[Chosen, Tables]:
        slot, flags, kind = self._pad(step.slot, self.sizes.slots), self._pad(step.flags), step.header[KIND]
        token = token_sampling.choose(logits, tables, slot, flags & MASKED > 0, kind)
        tables = token_sampling.record(tables, slot, token, flags & SAMPLED > 0, kind)
        chosen = token_sampling.report(logits, token, step.header[LOGPROBS] > 0)
        return jax.tree.map(lambda x: x[: step.bucket.results], chosen), tables

    def serve(
        self, arrays: Arrays, cache: Any, tables: Tables, packed: jax.Array, bucket: StepBucket
    ) -> tuple[Chosen, Chosen | None, Any, Tables]:
        """One step: (choices [L], log-probabilities of targets [K C], the new cache, the new tables)."""
        step = bucket.unpack(packed)
        model, x, cache = self._run(arrays, cache, tables, step)
        targets = self._targets(model, arrays, tables, x[bucket.rows : bucket.tokens], step) if bucket.chunks else None
        logits = self._logits(model, arrays, tables, x[step.ends()], step.slot)
        sampled, tables = self._choose(logits, tables, step)
        return sampled, targets, cache, tables

    def _targets(self, model: Any, arrays: Arrays, tables: Tables, x: jax.Array, step: Step) -> Chosen:
        """The log-probabilities of the targets, a chunk at a time."""
        needed = step.header[TARGETS] > 0
        rows, chunks, top = step.bucket.rows, step.bucket.chunks, min(token_sampling.TOP, self.vocab)

        def part(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> Chosen:
            x, targets, slot = chunk
            logits = self._logits(model, arrays, tables, x, jnp.broadcast_to(slot, targets.shape))
            scores = token_sampling.report(logits, self._pad(targets), jnp.bool(True))
            return jax.tree.map(lambda y: y[: targets.shape[0]], scores)

        def compute(_: Any) -> Chosen:
            scores = lax.map(part, (x.reshape(chunks, -1, x.shape[-1]), step.targets, step.slot[rows:]))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scores)

        def nothing(_: Any) -> Chosen:
            real = jnp.zeros((x.shape[0], top), jnp.float32)
            return Chosen(step.targets.reshape(-1), real[:, 0], jnp.zeros(real.shape, jnp.int32), real)

        return lax.cond(needed, compute, nothing, None)

    def serve_decode(
        self, arrays: Arrays, cache: Any, tables: Tables, packed: jax.Array, count: jax.Array, bucket: StepBucket
    ) -> tuple[Chosen, Any, Tables]:
        """`count` steps of one token for each row: (choices [steps, R], the new cache, the new tables)."""
        step = bucket.unpack(packed)
        empty = jax.eval_shape(functools.partial(self.serve, bucket=bucket), arrays, cache, tables, packed)[0]
        results = jax.tree.map(lambda s: jnp.zeros((self.sizes.steps, *s.shape), s.dtype), empty)

        def one(index: jax.Array, state: Any) -> Any:
            results, cache, tables = state
            tokens = jnp.where(index > 0, -1, step.tokens)
            substep = attrs.evolve(step, start=step.start + index, tokens=tokens)
            model, x, cache = self._run(arrays, cache, tables, substep)
            logits = self._logits(model, arrays, tables, x[substep.ends()], substep.slot)
            sampled, tables = self._choose(logits, tables, substep)
            return jax.tree.map(lambda all, x: all.at[index].set(x), results, sampled), cache, tables

        return lax.fori_loop(0, count, one, (results, cache, tables))


@runtime_checkable
class _TurnsHeads(Protocol):
    """A rotary embedding that can take cosines and sines of whole heads, computed once for all layers."""

    whole_heads: bool


def _lay_out(layout: WeightLayout | None) -> Callable[[Any], None]:
    """Changes how a model with separate layers stores and multiplies its weights."""

    def edit(model: Any) -> None:
        if layout is not None:
            lay_out_maps(model, layout)
        if layout == "transposed":
            for _, module in nnx.iter_modules(model):
                if isinstance(module, _TurnsHeads):
                    module.whole_heads = True

    return edit


def _assign(tables: Tables, slot: jax.Array, row: Tables) -> Tables:
    return jax.tree.map(lambda x, new: x.at[slot].set(new), tables, row)


def _put_masks(tables: Tables, slots: jax.Array, masks: jax.Array) -> Tables:
    return dataclasses.replace(tables, mask=tables.mask.at[slots].set(masks, mode="drop"))


def _whole_array(spec: Any) -> Array:
    return Array(spec.shape, spec.dtype)


def _row(spec: Array) -> Array:
    return Array(spec.shape[1:], spec.dtype)
