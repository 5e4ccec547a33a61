"""Rotary position embeddings (Su et al., 2021, "RoFormer")."""

import jax
import jax.numpy as jnp

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Layer, Precision
from axlearn_plugins_rope.scaling import Frequencies, Scaling, base_frequencies


class RotaryEmbedding(Layer):
    """Rotates queries and keys by angles proportional to their positions.

    A rotation acts on each pair (i, i + head_dim / 2) of a query or key. With `interleaved`, the pairs are (2i, 2i +
    1), as in the paper, GPT-J and DeepSeek.
    """

    @node
    class Config(Layer.Config["RotaryEmbedding"]):
        """Settings for the rotation.

        Attributes:
            head_dim: Size of a head.
            fraction: Share of a head that rotates; the other elements, at its end, stay unchanged (the partial rotary factor
                of GLM and Qwen3-Next). The frequencies are those of a head with the size of the rotated part.
            theta: Base of the frequencies.
            scaling: Length scaling of the frequencies, or None.
            interleaved: Rotate adjacent elements instead of half-split pairs.
        """

        head_dim: int = interface(default=REQUIRED)
        fraction: float = setting(default=1.0, gt=0, le=1, hide_default=True)
        theta: float = setting(default=10000.0, gt=1)
        scaling: Node[Scaling] | None = None
        interleaved: bool = False

    whole_heads = False
    """Set this to True to compute cosines and sines for whole heads. XLA on CPUs then computes them once instead of once per head
    and layer. Which of two products is rounded before their sum depends on the shape, so results are not bitwise
    reproducible."""

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.rotary_dim = int(cfg.head_dim * cfg.fraction)
        if self.rotary_dim % 2 or not self.rotary_dim:
            part = "" if cfg.fraction == 1 else f" * fraction {cfg.fraction} = {self.rotary_dim}"
            fix = (
                "set head_dim"
                if cfg.fraction == 1
                else "change fraction, so that it rotates an even number of elements"
            )
            raise RequestError(f"rope rotates pairs: head_dim must be even, got {cfg.head_dim}{part}\n    fix: {fix}")

    def frequencies(self) -> Frequencies:
        """Return the radians per position of each pair, and the factor for cosines and sines."""
        cfg = self.cfg
        if cfg.scaling is None:
            return Frequencies(base_frequencies(self.rotary_dim, cfg.theta))
        return cfg.scaling.build()(self.rotary_dim, cfg.theta)

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotate queries [B, S, N, H] and keys [B, S, K, H] to positions int32 [B or 1, S].

        Angles are float32.
        """
        radians, factor = self.frequencies()
        angle = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(radians, jnp.float32)[None, None, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        if self.cfg.interleaved:
            rotate = _rotate_adjacent
        else:
            rotate = _rotate_whole_heads if self.whole_heads else _rotate
        if self.rotary_dim == self.cfg.head_dim:
            return rotate(query, cos, sin), rotate(key, cos, sin)

        def rotate_part(x: jax.Array) -> jax.Array:
            part, rest = jnp.split(x, [self.rotary_dim], axis=-1)
            return jnp.concatenate([rotate(part, cos, sin), rest], axis=-1)

        return rotate_part(query), rotate_part(key)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rotate_whole_heads(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return x * cos + jnp.concatenate([b, a], axis=-1) * sin


def _rotate_adjacent(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
