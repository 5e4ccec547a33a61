"""Multi-head and grouped-query attention."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, factor_of, get_fields, interface, node, setting
from axlearn_core.errors import Problem, RequestError
from axlearn_core.nn.initializers import Initializer
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels import attention, masks
from axlearn_plugins_transformer.kernels.bias import Bias
from axlearn_plugins_transformer.kv_cache import (
    ContiguousCache,
    KVCache,
    build_cache,
    cached_mask,
    declare_prefix,
    hide_unwritten,
    read_cache,
)
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, ScoreScaleRole, WindowRole
from axlearn_plugins_transformer.norm import Norm


class PositionEncoding(Protocol):
    """Encodes positions in queries and keys.

    It is built with `head_dim`, `num_heads`, `rngs` and `precision`.

    An encoding that changes the scores, instead of or in addition to queries and keys, is a `ScoreBias`.
    """

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Encode the positions of a query and a key.

        The query is [B, S, N, H], the key [B, S, K, H], and the positions are int32 [B or 1, S]. The shapes do not change.
        """
        ...


@runtime_checkable
class ScoreBias(Protocol):
    """A position encoding that adds a bias to the scores."""

    def score_bias(self) -> Bias:
        """Return the bias, for `num_heads` query heads."""
        ...


def bias_of(position: Any) -> Bias | None:
    """Return the score bias of a position encoding, or None if it has none."""
    return position.score_bias() if isinstance(position, ScoreBias) else None


def window_of(window: int | Node[int | None] | None) -> int | None:
    """Return the size of a window.

    A node may build the size, so that layers of the same stack can have different windows.
    """
    return window.build() if isinstance(window, Node) else window


def cached_slots(context: Context) -> jax.Array:
    """Return the cache slots of the tokens, int32 [B or 1, S].

    Raises:
        RequestError: A row contains several documents.
    """
    if context.segment_ids is not None:
        raise RequestError("attention with a cache requires one document per row: leave out segment_ids")
    slots: Any = context.slots
    return slots


class AttentionLayer(Protocol):
    """A layer that mixes information between positions.

    It is built with `input_dim`, `rngs` and `precision`.
    """

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        ...

    def cache_spec(self) -> Any:
        """Return the entries of the cache; see `KeepsCache`."""
        ...


def score_scale(scale: float | Node[float] | None, size: int, width: int, *, grows: bool) -> float:
    """Return the factor of attention scores.

    Args:
        scale: The factor, a node that builds it, or None for size ** -0.5.
        size: Size of a query or key.
        width: Width of the model.
        grows: Whether the size of a head is relative to the width.
    """
    return size**-0.5 if scale is None else factor_of(scale, size=size, width=width, grows=grows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKeys:
    """Keys and values that a layer shares with later layers.

    Attributes:
        key: Keys of the call's tokens, [B, S, K, H].
        value: Their values, [B, S, K, H].
        cache: The layer's cache, which contains them, or None.
        window: Number of keys that the layer sees, or None for all.
    """

    key: jax.Array
    value: jax.Array
    cache: Any
    window: int | None = dataclasses.field(metadata={"static": True})


class Attention(Layer):
    """Self-attention, causal by default, with optional grouped queries.

    See Vaswani et al., 2017. Queries are grouped if `num_kv_heads` < `num_heads` (Ainslie et al., 2023). Without
    `position`, it has no position encoding.
    """

    @node
    class Config(Layer.Config["Attention"], WindowRole, AttentionKernelRole, ScoreScaleRole):
        """Settings for the heads, the mask and the optional parts.

        Attributes:
            num_heads: Number of query heads.
            num_kv_heads: Number of key-value heads (default: `num_heads`).
            head_dim: Size of a head (default: the width divided by `num_heads`).
            position: Position encoding, or None.
            qk_norm: Norm over each head of queries and keys, or None.
            qk_norm_over: What a norm covers: one head, or all heads of a token together (OLMo 2).
            qk_norm_last: Normalize after the positions are encoded, instead of before.
            output_gate: Projection from the input of the layer to output gates, or None. Each weighted sum of values is
                multiplied by the sigmoid of its gate (Qiu et al., 2025, arXiv 2505.06708).
            output_gate_per: Whether each element of a head has a gate, or each head.
            sinks: Initializer of trained sinks, or None. A sink is an extra logit of a head in the softmax, without a value
                (OpenAI, 2025, arXiv 2508.10925, section 2.2).
            scale: Factor applied to the scores (default: head_dim ** -0.5): a number, or a node that builds one; see
                `score_scale`.
            softcap: Soft cap of the scores, or None.
            window: Number of positions that a query attends to, including its own: an int, a node that builds an int or None,
                or None for all.
            chunk: Size of the chunks of positions that attention stays within (Llama 4), or None. As `window`, it may be a node.
            causal: Hide later positions from each query. Set it to False for encoders.
            kernel: Implementation of the `attention` op, or of the op that `kv_cache` uses. None selects the best one.
            query: Query projection.
            key: Key projection, or None with `kv_source`.
            value: Value projection. If it is None, the values are the projected keys, before norm and positions (the global
                layers of Gemma 4).
            value_norm: Norm over each head of values, or None.
            kv_name: Name under which later layers can use the layer's keys and values, or None.
            kv_source: `kv_name` of an earlier layer, whose keys and values the layer uses instead of its own (Gemma 3n), or None.
                It does not store any in its cache.
            output: Output projection.
            kv_cache: Layout of the cache.
        """

        input_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=REQUIRED, ge=1, le=2**24)
        num_kv_heads: int | None = setting(default=None, ge=1)
        head_dim: int | None = setting(default=None, ge=1)
        position: Node[PositionEncoding] | None = None
        qk_norm: Node[Norm] | None = None
        qk_norm_over: Literal["head", "all_heads"] = setting(default="head", hide_default=True)
        qk_norm_last: bool = setting(default=False, hide_default=True)
        output_gate: Node[Projection] | None = setting(default=None, hide_default=True)
        output_gate_per: Literal["element", "head"] = setting(default="element", hide_default=True)
        sinks: Node[Initializer] | None = setting(default=None, hide_default=True)
        scale: float | Node[float] | None = setting(default=None, gt=0)
        softcap: float | None = setting(default=None, gt=0)
        window: int | Node[int | None] | None = setting(default=None, ge=1)
        chunk: int | Node[int | None] | None = setting(default=None, ge=1, hide_default=True)
        causal: bool = True
        kernel: str | None = setting(default=None, kind="execution")
        query: Node[Projection] = Linear.Config()
        key: Node[Projection] | None = Linear.Config()
        value: Node[Projection] | None = Linear.Config()
        value_norm: Node[Norm] | None = setting(default=None, hide_default=True)
        kv_name: str | None = setting(default=None, hide_default=True)
        kv_source: str | None = setting(default=None, hide_default=True)
        output: Node[Projection] = Linear.Config()
        kv_cache: Node[KVCache] = setting(default=ContiguousCache.Config(), kind="execution")

        def validate(self) -> Iterable[Problem]:
            """Check that `num_kv_heads` divides `num_heads`, and that keys come from one place."""
            yield from super().validate()
            own = [name for name in ("key", "value", "value_norm", "kv_name") if get_fields(self)[name] is not None]
            if self.kv_source is None and self.key is None:
                yield Problem(path="key", message="must be set without kv_source", fix="set key or kv_source")
            if self.kv_source is not None and own:
                yield Problem(
                    path="kv_source",
                    message="a layer with shared keys and values cannot project its own",
                    got=", ".join(own),
                    fix=f"set {', '.join(own)} to null",
                )
            if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
                divisors = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
                yield Problem(
                    path="num_kv_heads",
                    message="does not divide num_heads",
                    got=f"num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}",
                    expected=f"one of {', '.join(divisors)}",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width = cfg.input_dim
        if cfg.head_dim is None and width % cfg.num_heads:
            raise RequestError(
                f"attention: num_heads={cfg.num_heads} does not divide the width {width}\n"
                "    fix: set head_dim, or change num_heads"
            )
        self.kv_heads, self.head_dim = cfg.num_kv_heads or cfg.num_heads, cfg.head_dim or width // cfg.num_heads
        query_heads, kv_heads = (cfg.num_heads, self.head_dim), (self.kv_heads, self.head_dim)
        head_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv", "head_dim")
        out_axes = ("heads", "head_dim", "embed")
        self.query = self.child(cfg.query, rngs=rngs, input_dims=(width,), output_dims=query_heads, axes=head_axes)
        if cfg.key is not None:
            self.key = self.child(cfg.key, rngs=rngs, input_dims=(width,), output_dims=kv_heads, axes=kv_axes)
        if cfg.value is not None:
            self.value = self.child(cfg.value, rngs=rngs, input_dims=(width,), output_dims=kv_heads, axes=kv_axes)
        self.output = self.child(cfg.output, rngs=rngs, input_dims=query_heads, output_dims=(width,), axes=out_axes)
        if cfg.qk_norm is not None:
            count = cfg.num_heads, self.kv_heads
            query_dim, key_dim = (self.head_dim * (n if cfg.qk_norm_over == "all_heads" else 1) for n in count)
            self.query_norm = self.child(cfg.qk_norm, rngs=rngs, dim=query_dim)
            if cfg.kv_source is None:
                self.key_norm = self.child(cfg.qk_norm, rngs=rngs, dim=key_dim)
        if cfg.value_norm is not None:
            self.value_norm = self.child(cfg.value_norm, rngs=rngs, dim=self.head_dim)
        if cfg.output_gate is not None:
            gates, axes = (
                (query_heads, head_axes) if cfg.output_gate_per == "element" else (query_heads[:1], head_axes[:2])
            )
            self.output_gate = self.child(cfg.output_gate, rngs=rngs, input_dims=(width,), output_dims=gates, axes=axes)
        if cfg.sinks is not None:
            self.sinks = self.parameter(rngs, cfg.sinks, (cfg.num_heads,), ("heads",))
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, head_dim=self.head_dim, num_heads=cfg.num_heads)

    def cache_spec(self) -> Any:
        """Return the entries of the cache; see `KeepsCache`. The mask determines how long they live."""
        return () if self.cfg.kv_source is not None else self._kv_spec()

    def _kv_spec(self) -> Any:
        """Return the entries of the cache that the layer reads."""
        layout, mask = build_cache(self.cfg.kv_cache), cached_mask(self.mask)
        spec = layout.spec(self.kv_heads, self.head_dim, self.precision.compute, mask.reach())
        return declare_prefix(spec, mask)

    def mask(self, context: Context) -> masks.Mask:
        """Return the attention mask. A subclass may return any mask, for example from `masks.with_prefix`.

        Args:
            context: Facts about the rows. With a cache, it has slots and positions, and no segments. In a serving step, every
                token is a row.
        """
        mask = masks.visible(context, window_of(self.cfg.window), causal=self.cfg.causal)
        chunk = window_of(self.cfg.chunk)
        return mask if chunk is None else mask & masks.chunked(context, chunk)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        query, key, value = self.project(x, context)
        context_vectors, cache = self.attend(self.scores(query, key, value, context), context, cache)
        if self.cfg.kv_name is not None:
            window = cached_mask(self.mask).reach()
            context.share(self.cfg.kv_name, SharedKeys(key, value, cache, None if window is None else int(window)))
        return self.finish(context_vectors, x), cache

    def project(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries [B, S, N, H], keys [B, S, K, H] and values [B, S, K, V] of [B, S, D], with their positions."""
        cfg = self.cfg
        q = tag(self.query(x), "query")
        if cfg.kv_source is not None:
            source = self._read_source(context)
            q = constrain(q, "batch", "sequence", "activation_heads", None)
            return self._encode(q, q, context)[0], source.key, source.value
        k = tag(self.key(x), "key")
        v = k if cfg.value is None else tag(self.value(x), "value")
        q = constrain(q, "batch", "sequence", "activation_heads", None)
        k = constrain(k, "batch", "sequence", "activation_kv", None)
        v = constrain(v, "batch", "sequence", "activation_kv", None)
        if cfg.value_norm is not None:
            v = self.value_norm(v)
        return (*self._encode(q, k, context), v)

    def _encode(self, q: jax.Array, k: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Normalize queries and keys, and encode their positions."""
        if not self.cfg.qk_norm_last:
            q, k = self._normalize(q, k)
        if self.cfg.position is not None:
            positions = context.positions
            q, k = self.position(
                q, k, jnp.arange(q.shape[1], dtype=jnp.int32)[None] if positions is None else positions
            )
        return self._normalize(q, k) if self.cfg.qk_norm_last else (q, k)

    def _read_source(self, context: Context) -> SharedKeys:
        """Return the keys and values of the layer that `kv_source` names.

        Raises:
            RequestError: They do not exist, have other sizes, or may lack keys that this layer sees.
        """
        source: SharedKeys = context.read_shared(self.cfg.kv_source or "")
        reach, sizes = cached_mask(self.mask).reach(), (self.kv_heads, self.head_dim)
        if source.key.shape[2:] != sizes or (source.window is not None and (reach is None or reach > source.window)):
            raise RequestError(
                f"attention cannot use the keys and values {self.cfg.kv_source!r} of an earlier layer\n"
                f"    got: {source.key.shape[2]} heads of size {source.key.shape[3]}, and a window of {source.window}\n"
                f"    expected: {sizes[0]} heads of size {sizes[1]}, and a window of at least {reach}\n"
                "    fix: use the same num_kv_heads, head_dim and window in both layers"
            )
        return source

    def _normalize(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.cfg.qk_norm is None:
            return query, key
        key_norm = self.query_norm if self.cfg.kv_source is not None else self.key_norm  # then, the key is the query
        if self.cfg.qk_norm_over == "head":
            return self.query_norm(query), key_norm(key)
        q, k = (x.reshape(*x.shape[:2], -1) for x in (query, key))
        return self.query_norm(q).reshape(query.shape), key_norm(k).reshape(key.shape)

    def scores(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context) -> attention.AttentionOp:
        """Return the op that attends. A subclass may change it, for example to add sinks."""
        cfg = self.cfg
        return attention.AttentionOp(
            query,
            key,
            value,
            mask=self.mask(context),
            scale=score_scale(cfg.scale, self.head_dim, cfg.input_dim, grows=cfg.head_dim is None),
            softcap=cfg.softcap,
            bias=None if cfg.position is None else bias_of(self.position),
            sinks=None if cfg.sinks is None else self.computed(self.sinks),
        )

    def attend(self, op: attention.AttentionOp, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Attend to the op's keys and, with a cache, to the cached keys too: -> ([B, S, N, V], new cache)."""
        cfg = self.cfg
        if cache is None:
            return op.compute_context(cfg.kernel), None
        op = attrs.evolve(op, mask=hide_unwritten(op.mask, context, self._kv_spec()))
        if cfg.kv_source is not None:
            contents = self._read_source(context).cache
            return op.tag_context(read_cache(cfg.kv_cache, contents, op, cached_slots(context), cfg.kernel)), cache
        context_vectors, cache = build_cache(cfg.kv_cache).attend(cache, op, cached_slots(context), cfg.kernel)
        return op.tag_context(context_vectors), cache

    def finish(self, context_vectors: jax.Array, x: jax.Array) -> jax.Array:
        """Gate [B, S, N, V], and project it to [B, S, D].

        Args:
            context_vectors: Weighted sums of the values.
            x: Input of the layer, for gates.
        """
        if self.cfg.output_gate is not None:
            heads = ("batch", "sequence", "activation_heads")
            gate = constrain(self.output_gate(x), *heads, *((None,) if self.cfg.output_gate_per == "element" else ()))
            context_vectors = context_vectors * jax.nn.sigmoid(gate if gate.ndim == 4 else gate[..., None])
        return tag(self.output(context_vectors), "attention_out")
