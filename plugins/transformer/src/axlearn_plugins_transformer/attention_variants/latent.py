"""Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", arXiv 2405.04434).

Legend: B batch, S positions, T cached positions, D width, N heads, H content size of a head, P positional size of a head,
U size of a value, Q rank of the query latents, R rank of the key-value latents.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, Scaled, interface, node, setting, size_of
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.attention import PositionEncoding, bias_of, cached_slots, score_scale, window_of
from axlearn_plugins_transformer.attention_variants.latent_cache import (
    ContiguousLatentCache,
    ExpandsLatents,
    LatentCache,
    SeenLatents,
)
from axlearn_plugins_transformer.attention_variants.lightning_indexer import Indexer
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Mask, visible
from axlearn_plugins_transformer.kv_cache import build_cache, cached_mask, declare_prefix, hide_unwritten
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, ScoreScaleRole, WindowRole
from axlearn_plugins_transformer.norm import Norm, RMSNorm


class LatentAttention(Layer):
    """Attention that computes keys and values from one short latent per token.

    A cache stores only the latents.

        c = norm(down(x))                          [B, S, R]     cached
        k_rope = position(key_rope(x))             [B, S, P]     cached; shared by all heads
        q = [query, position(query_rope)]          of norm(query_down(x)), or of x without `query_rank`
        k = [key(c), k_rope],  v = value(c)
        y = output(softmax(q k / sqrt(H + P)) v)

    When decoding one token with a cache, keys and values are never computed. Since `q (key c) = (q key) c`, the query is
    mapped to the latent space and attends to the latents as to a single head. `value` maps the result back (the
    absorption of W^UK and W^UV in the paper).
    """

    @node
    class Config(Layer.Config["LatentAttention"], WindowRole, AttentionKernelRole, ScoreScaleRole):
        """Settings for the heads, the latents and the optional parts.

        The default sizes follow the paper's ratios (R = 4 H, P = H / 2, U = H, Q = 0.3 D). `softcap`, `window`, `causal` and
        `kernel` are as in `Attention`.

        Attributes:
            num_heads: Number of heads.
            head_dim: Content size of a head (default: the width divided by `num_heads`).
            rope_head_dim: Positional size of a head; it may be relative to `head_dim`.
            value_head_dim: Size of a value; it may be relative to `head_dim`.
            kv_rank: Rank of the key-value latents; it may be relative to `head_dim`.
            query_rank: Rank of the query latents; it may be relative to the width. None computes queries directly from x
                (DeepSeek-V2-Lite).
            position: Position encoding, or None.
            norm: Norm of the latents, or None.
            scale: Factor applied to the scores (default: (head_dim + rope_head_dim) ** -0.5); see `score_scale`.
            indexer: Chooses the keys that each query sees (DeepSeek-V3.2). None lets it see all.
            latent_cache: Layout of the cache.
        """

        input_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=REQUIRED, ge=1, le=2**24)
        head_dim: int | None = setting(default=None, ge=1)
        rope_head_dim: int | Node[int] = setting(default=Scaled(factor=0.5, multiple_of=2), ge=1)
        value_head_dim: int | Node[int] = setting(default=Scaled(factor=1.0), ge=1)
        kv_rank: int | Node[int] = setting(default=Scaled(factor=4.0), ge=1)
        query_rank: int | Node[int] | None = setting(default=Scaled(factor=0.3, multiple_of=64), ge=1)
        position: Node[PositionEncoding] | None = None
        norm: Node[Norm] | None = RMSNorm.Config()
        scale: float | Node[float] | None = setting(default=None, gt=0)
        softcap: float | None = setting(default=None, gt=0)
        window: int | Node[int | None] | None = setting(default=None, ge=1)
        causal: bool = True
        kernel: str | None = setting(default=None, kind="execution")
        query_down: Node[Projection] = Linear.Config()
        query: Node[Projection] = Linear.Config()
        query_rope: Node[Projection] = Linear.Config()
        down: Node[Projection] = Linear.Config()
        key_rope: Node[Projection] = Linear.Config()
        key: Node[Projection] = Linear.Config()
        value: Node[Projection] = Linear.Config()
        output: Node[Projection] = Linear.Config()
        indexer: Node[Indexer] | None = setting(default=None, hide_default=True)
        latent_cache: Node[LatentCache] = setting(default=ContiguousLatentCache.Config(), kind="execution")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, heads = cfg.input_dim, cfg.num_heads
        if cfg.head_dim is None and width % heads:
            raise RequestError(
                f"latent-attention: num_heads={heads} does not divide the width {width}\n"
                "    fix: set head_dim, or change num_heads"
            )
        self.head_dim = cfg.head_dim or width // heads
        self.rope_dim = size_of(cfg.rope_head_dim, self.head_dim)
        self.rank = size_of(cfg.kv_rank, self.head_dim)
        values = (heads, size_of(cfg.value_head_dim, self.head_dim))

        def project(cfg_map: Node[Projection], source: tuple[int, ...], out: tuple[int, ...], *axes: str | None) -> Any:
            return self.child(cfg_map, rngs=rngs, input_dims=source, output_dims=out, axes=axes)

        # The default rules do not shard the `rank` axis of an output. If the rank is an input, its axis is named `embed`.
        head_axes = ("embed", "heads", "head_dim")
        source = (width,)
        if cfg.query_rank is not None:
            source = (size_of(cfg.query_rank, width),)
            self.query_down = project(cfg.query_down, (width,), source, "embed", "rank")
        self.query = project(cfg.query, source, (heads, self.head_dim), *head_axes)
        self.query_rope = project(cfg.query_rope, source, (heads, self.rope_dim), *head_axes)
        self.down = project(cfg.down, (width,), (self.rank,), "embed", "rank")
        self.key_rope = project(cfg.key_rope, (width,), (self.rope_dim,), "embed", "head_dim")
        self.key = project(cfg.key, (self.rank,), (heads, self.head_dim), *head_axes)
        self.value = project(cfg.value, (self.rank,), values, *head_axes)
        self.output = project(cfg.output, values, (width,), "heads", "head_dim", "embed")
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=self.rank)
            if cfg.query_rank is not None:
                self.query_norm = self.child(cfg.norm, rngs=rngs, dim=source[0])
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, head_dim=self.rope_dim, num_heads=heads)
        if cfg.indexer is not None:
            self.indexer = self.child(cfg.indexer, rngs=rngs, input_dim=cfg.input_dim, query_dim=source[0])

    def cache_spec(self) -> Any:
        """Return the entries of the cache, which holds R + P numbers per token. The mask determines how long they live.

        With an indexer, it is a pair of these entries and the indexer's.
        """
        layout, mask = build_cache(self.cfg.latent_cache), cached_mask(self.mask)
        dtype, reach = self.precision.compute, mask.reach()
        if isinstance(layout, ExpandsLatents):
            spec = layout.expanded_spec(self.cfg.num_heads, self.head_dim + self.rope_dim, dtype, reach)
        else:
            spec = layout.spec(self.rank + self.rope_dim, dtype, reach)
        if self.cfg.indexer is not None:
            spec = spec, self.indexer.cache_spec(layout, reach)
        return declare_prefix(spec, mask)

    def mask(self, context: Context) -> Mask:
        """Return the attention mask; see `Attention.mask`."""
        return visible(context, window_of(self.cfg.window), causal=self.cfg.causal)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        source = self._query_source(x)
        q, q_rope = self._queries(source)
        latents = tag(self.down(x), "kv_latent")
        latents = latents if self.cfg.norm is None else self.norm(latents)
        k_rope = self.key_rope(x)[:, :, None]
        if self.cfg.position is not None:
            positions = context.positions
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
            q_rope, k_rope = self.position(q_rope, k_rope, positions)
        mask, keys, indexed = self.mask(context), None, self.cfg.indexer is not None
        if indexed:
            cache, keys = (None, None) if cache is None else cache
            layout = build_cache(self.cfg.latent_cache)
            selection, keys = self.indexer(x, source, context, mask, layout, keys)
            mask = mask & selection
        if cache is None:
            y = self._attend_expanded(q, q_rope, latents, k_rope, context, mask).compute_context(self.cfg.kernel)
        else:
            entries = jnp.concatenate([latents, k_rope[:, :, 0]], axis=-1)
            y, cache = self._attend_cached(q, q_rope, entries, context, mask, cache)
            y = AttentionOp.tag_context(y)
            cache = (cache, keys) if indexed else cache
        return tag(self.output(y), "attention_out"), cache

    def _query_source(self, x: jax.Array) -> jax.Array:
        """Return the input of the query projections, [B, S, Q]: the latents of the queries, or x if they have none."""
        if self.cfg.query_rank is None:
            return x
        x = tag(self.query_down(x), "query_latent")
        return x if self.cfg.norm is None else self.query_norm(x)

    def _queries(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the queries: [B, S, Q] -> [B, S, N, H] and [B, S, N, P]."""
        heads = ("batch", "sequence", "activation_heads", None)
        return constrain(tag(self.query(x), "query"), *heads), constrain(tag(self.query_rope(x), "query"), *heads)

    def _attend_cached(
        self, q: jax.Array, q_rope: jax.Array, entries: jax.Array, context: Context, mask: Mask, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Write the new entries [B, S, R + P] to the cache and attend.

        Return [B, S, N, U] and the new cache.
        """
        layout = build_cache(self.cfg.latent_cache)
        absorbed = entries.shape[1] == 1 and not _expands(layout)

        def attention(slots_view: SeenLatents) -> AttentionOp:
            latents, k_rope = slots_view.latents[..., : self.rank], slots_view.latents[..., None, self.rank :]
            build = self._attend_absorbed if absorbed else self._attend_expanded
            return build(q, q_rope, latents, k_rope, context, mask, slots_view.slots)

        y, cache = layout.attend(cache, entries, cached_slots(context), attention, self.cfg.kernel)
        return (self._values(y) if absorbed else y), cache

    def _attend_expanded(
        self,
        q: jax.Array,
        q_rope: jax.Array,
        latents: jax.Array,
        k_rope: jax.Array,
        context: Context,
        mask: Mask,
        slots: jax.Array | None = None,
    ) -> AttentionOp:
        """Build the op with the keys and values of every head. Its result is [B, S, N, U]."""
        heads = ("batch", "sequence", "activation_heads", None)
        k = constrain(tag(self.key(latents), "key"), *heads)
        v = constrain(tag(self.value(latents), "value"), *heads)
        k_rope = jnp.broadcast_to(k_rope, (*k.shape[:3], self.rope_dim))
        keys = jnp.concatenate([k, k_rope.astype(k.dtype)], axis=-1)
        return self._op(jnp.concatenate([q, q_rope], axis=-1), keys, v, context, mask, slots)

    def _attend_absorbed(
        self,
        q: jax.Array,
        q_rope: jax.Array,
        latents: jax.Array,
        k_rope: jax.Array,
        context: Context,
        mask: Mask,
        slots: jax.Array | None = None,
    ) -> AttentionOp:
        """Build the op in the latent space, with the latents as one head.

        Its result [B, S, N, R] needs `_values`.
        """
        up_key, key_bias = _affine(self.key, self.rank, self.precision.compute)
        queries = [jnp.einsum("bsnh,rnh->bsnr", q, up_key), q_rope]
        keys = [latents[:, :, None], k_rope]
        if key_bias is not None:  # equal for all keys of a query, so it only matters if the scores are capped
            queries.append(jnp.einsum("bsnh,nh->bsn", q, key_bias)[..., None])
            keys.append(jnp.ones_like(k_rope[..., :1]))
        q, k = jnp.concatenate(queries, axis=-1), jnp.concatenate(keys, axis=-1)
        return self._op(q, k, latents[:, :, None], context, mask, slots)

    def _values(self, y: jax.Array) -> jax.Array:
        """Map the latent results to values: [B, S, N, R] -> [B, S, N, U]."""
        up_value, value_bias = _affine(self.value, self.rank, self.precision.compute)
        y = jnp.einsum("bsnr,rnu->bsnu", y, up_value)
        return y if value_bias is None else y + value_bias[None, None]

    def _op(
        self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context, mask: Mask, slots: jax.Array | None
    ) -> AttentionOp:
        cfg = self.cfg
        if slots is not None:
            mask = hide_unwritten(mask, context, self.cache_spec())
        return AttentionOp(
            q,
            k,
            v,
            mask=mask,
            scale=score_scale(cfg.scale, self.head_dim + self.rope_dim, cfg.input_dim, grows=cfg.head_dim is None),
            softcap=cfg.softcap,
            bias=None if cfg.position is None else bias_of(self.position),
            query_slots=None if slots is None else context.slots,
            key_slots=slots,
        )


def _affine(projection: Any, rank: int, dtype: str) -> tuple[jax.Array, jax.Array | None]:
    """Return a projection from [R] as a matrix [R, N, H] and a bias [N, H] or None.

    Any projection other than a `Linear` (adapted, quantized) is applied to the unit vectors.
    """
    if type(projection) is Linear:
        bias = projection.bias if projection.cfg.bias else None
        return projection.computed(projection.weight), None if bias is None else projection.computed(bias)
    units = projection(jnp.eye(rank + 1, rank, dtype=dtype))
    return units[:-1] - units[-1:], units[-1]


def _expands(layout: object) -> bool:
    """Return whether a cache layout stores the keys and values of every head."""
    return isinstance(layout, ExpandsLatents)
