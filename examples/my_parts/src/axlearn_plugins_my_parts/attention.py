"""Attention of a kind that no plugin has, which features, plans and the server treat as their own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.extend import REQUIRED, Context, Layer, Linear, Node, Precision, Projection, interface, node, setting
from axlearn_plugins_transformer.attention import PositionEncoding, bias_of, cached_slots, window_of
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import visible
from axlearn_plugins_transformer.kv_cache import ContiguousCache, KVCache, build_cache
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, WindowRole

SCALE = 10.0
"""Of the cosines."""


class CosineAttention(Layer):
    """Scores by the angle between query and key (Liu et al., 2022, "Swin Transformer V2", arXiv 2111.09883).

    `SCALE * cos(query, key)` cannot grow with the activations.
    """

    @node
    class Config(Layer.Config["CosineAttention"], WindowRole, AttentionKernelRole):
        """The roles let `interleave` set `window`, and `context-parallel` and `paged-cache` set `kernel`.

        `rope` and `alibi` fill `position` because it is annotated as a slot for a position encoding, and `paged-cache` fills
        `kv_cache` for the same reason.
        """

        input_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=4, ge=1)
        position: Node[PositionEncoding] | None = None
        window: int | Node[int | None] | None = setting(default=None, ge=1)
        kernel: str | None = setting(default=None, kind="execution")
        query: Node[Projection] = Linear.Config()
        key: Node[Projection] = Linear.Config()
        value: Node[Projection] = Linear.Config()
        output: Node[Projection] = Linear.Config()
        kv_cache: Node[KVCache] = setting(default=ContiguousCache.Config(), kind="execution")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.width, self.heads = (cfg.input_dim,), (cfg.num_heads, cfg.input_dim // cfg.num_heads)
        into, out = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
        sizes: dict[str, Any] = {"input_dims": self.width, "output_dims": self.heads, "axes": into}
        self.query = self.child(cfg.query, rngs=rngs, **sizes)
        self.key = self.child(cfg.key, rngs=rngs, **sizes)
        self.value = self.child(cfg.value, rngs=rngs, **sizes)
        self.output = self.child(cfg.output, rngs=rngs, input_dims=self.heads, output_dims=self.width, axes=out)
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, num_heads=self.heads[0], head_dim=self.heads[1])

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of at most `length` tokens."""
        return build_cache(self.cfg.kv_cache).init(batch, length, *self.heads, self.precision.compute)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and its cache -> ([B, S, D], the new cache)."""
        cfg = self.cfg
        query, key, bias = _normalize(self.query(x)), _normalize(self.key(x)), None
        if cfg.position is not None:
            index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
            query, key = self.position(query, key, index if context.positions is None else context.positions)
            bias = bias_of(self.position)
        mask = visible(context, window_of(cfg.window), causal=True)
        op = AttentionOp(query, key, self.value(x), mask=mask, scale=SCALE, bias=bias)
        if cache is None:
            return self.output(op.context(cfg.kernel)), None
        result, cache = build_cache(cfg.kv_cache).attend(cache, op, cached_slots(context), cfg.kernel)
        return self.output(result), cache


def _normalize(x: jax.Array) -> jax.Array:
    """[..., H] of length 1."""
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)
