"""Rotary position embeddings (Su et al., 2021, "RoFormer")."""

import jax
import jax.numpy as jnp

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Layer, Precision
from axlearn_plugins_rope.scaling import Frequencies, Scaling, unscaled


class RotaryEmbedding(Layer):
    """Turns each pair (i, i + head_dim / 2) of a query or key by an angle that grows with its position.

    With `interleaved` the pairs are (2i, 2i + 1), as in the paper, in GPT-J and in DeepSeek.
    """

    @node
    class Config(Layer.Config["RotaryEmbedding"]):
        """`theta` is the base of the frequencies; `scaling` stretches them for longer texts."""

        head_dim: int = interface(default=REQUIRED)
        theta: float = setting(default=10000.0, gt=1)
        scaling: Node[Scaling] | None = None
        interleaved: bool = False

    whole_heads = False
    """Whether cosines and sines are those of whole heads: XLA for CPU then computes each once, and not again for each head of each
    layer. Which product is rounded before they are added up depends on the shape, so it is for programs that need no bits."""

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)
        if cfg.head_dim % 2:
            raise RequestError(f"rope turns pairs: head_dim has to be even, got {cfg.head_dim}\n    fix: set head_dim")

    def frequencies(self) -> Frequencies:
        """Radians per position of each pair, and the factor on cosines and sines."""
        cfg = self.cfg
        if cfg.scaling is None:
            return Frequencies(unscaled(cfg.head_dim, cfg.theta))
        return cfg.scaling.build()(cfg.head_dim, cfg.theta)

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, S, N, H], [B, S, K, H] and int32 [B or 1, S] -> the same shapes. Angles are float32."""
        radians, factor = self.frequencies()
        angle = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(radians, jnp.float32)[None, None, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        if self.cfg.interleaved:
            turn = _turn_neighbours
        else:
            turn = _turn_whole_heads if self.whole_heads else _turn
        return turn(query, cos, sin), turn(key, cos, sin)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _turn_whole_heads(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return x * cos + jnp.concatenate([b, a], axis=-1) * sin


def _turn_neighbours(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
