"""Attention whose temperature depends on the position (Nakanishi, 2025, "Scalable-Softmax", arXiv 2501.19399)."""

import jax
import jax.numpy as jnp

from axlearn_core.config import node, setting
from axlearn_core.nn.layer import Layer, Precision


class QueryTemperature(Layer):
    """A position encoding that multiplies the queries at later positions by a larger factor.

    A softmax over more keys is flatter, and this factor sharpens it: `1 + scale * log(1 + floor((position + 1) / interval))`.
    Llama 4 uses it in its layers without a rotary encoding. It has no parameters. Keys do not change.
    """

    @node
    class Config(Layer.Config["QueryTemperature"]):
        """Settings for the factor.

        Attributes:
            interval: Number of positions between changes of the factor. The first `interval - 1` queries do not change.
            scale: Strength of the change.
        """

        interval: int = setting(default=8192, ge=1)
        scale: float = setting(default=0.1, ge=0)

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scale queries [B, S, N, H] at positions int32 [B or 1, S], and return them with the keys [B, S, K, H].

        The factor is float32.
        """
        count = jnp.floor((positions.astype(jnp.float32) + 1) / self.cfg.interval)
        factor = 1 + self.cfg.scale * jnp.log1p(count)
        return (query.astype(jnp.float32) * factor[:, :, None, None]).astype(query.dtype), key
