"""The `cosine-attention` component.

Features, plans and the server support it like the built-in attention layers.
"""

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
"""Scale of the cosines."""


class CosineAttention(Layer):
    """Attention that scores by the cosine of the angle between query and key.

    The scores are `SCALE * cos(query, key)`, so they cannot grow with the activations. Source: Liu et al., 2022, "Swin
    Transformer V2", arXiv 2111.09883.
    """

    @node
    class Config(Layer.Config["CosineAttention"], WindowRole, AttentionKernelRole):
        """Settings for `CosineAttention`.

        The roles let the `interleave` feature set `window`, and let `context-parallel` and `paged-cache` set `kernel`.
        `rope` and `alibi` set `position` because its annotation is a slot for a position encoding. `paged-cache` sets
        `kv_cache` for the same reason.

        Attributes:
            input_dim: Width of the input and output. The parent layer sets it.
            num_heads: Number of heads.
            position: Position encoding, or None.
            window: Number of tokens that each token attends to, or None for all earlier tokens.
            kernel: Kernel of the attention op, or None to select one automatically.
            query: Projection of the queries.
            key: Projection of the keys.
            value: Projection of the values.
            output: Projection of the output.
            kv_cache: Cache for generation.
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
        input_axes, output_axes = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
        sizes: dict[str, Any] = {"input_dims": self.width, "output_dims": self.heads, "axes": input_axes}
        self.query = self.child(cfg.query, rngs=rngs, **sizes)
        self.key = self.child(cfg.key, rngs=rngs, **sizes)
        self.value = self.child(cfg.value, rngs=rngs, **sizes)
        self.output = self.child(cfg.output, rngs=rngs, input_dims=self.heads, output_dims=self.width, axes=output_axes)
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, num_heads=self.heads[0], head_dim=self.heads[1])

    def cache_spec(self) -> Any:
        """Return the entries of the cache; see `axlearn_plugins_transformer.cache_spec`."""
        layout, window = build_cache(self.cfg.kv_cache), window_of(self.cfg.window)
        return layout.spec(*self.heads, self.precision.compute, window)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Return the output, [B, S, D], and the new cache.

        Args:
            x: Input, [B, S, D].
            context: Positions and segments of the batch.
            cache: Arrays of `cache_spec`, or None in training.
        """
        cfg = self.cfg
        query, key, bias = _normalize(self.query(x)), _normalize(self.key(x)), None
        if cfg.position is not None:
            index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
            query, key = self.position(query, key, index if context.positions is None else context.positions)
            bias = bias_of(self.position)
        mask = visible(context, window_of(cfg.window), causal=True)
        op = AttentionOp(query, key, self.value(x), mask=mask, scale=SCALE, bias=bias)
        if cache is None:
            return self.output(op.compute_context(cfg.kernel)), None
        result, cache = build_cache(cfg.kv_cache).attend(cache, op, cached_slots(context), cfg.kernel)
        return self.output(result), cache


def _normalize(x: jax.Array) -> jax.Array:
    """Normalize [..., H] to length 1."""
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)
