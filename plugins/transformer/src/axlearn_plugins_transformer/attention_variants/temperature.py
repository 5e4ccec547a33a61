"""Attention whose temperature depends on the position (Nakanishi, 2025, "Scalable-Softmax", arXiv 2501.19399)."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.layer import Layer, Precision
from axlearn_plugins_transformer.attention import PositionEncoding, bias_of
from axlearn_plugins_transformer.kernels.bias import Bias


class QueryTemperature(Layer):
    """A position encoding that multiplies the queries at later positions by a larger factor.

    A softmax over more keys is flatter, and this factor sharpens it: `1 + scale * log(1 + floor((position + shift) / interval))`.
    Llama 4 uses it in its layers without a rotary encoding, and Ministral 3 after a rotary encoding, which is then `inner`. It has
    no parameters of its own. It does not change keys.
    """

    @node
    class Config(Layer.Config["QueryTemperature"]):
        """Settings for the factor.

        Attributes:
            interval: Number of positions between changes of the factor. The first `interval - shift` queries do not change.
            scale: Strength of the change.
            shift: Number added to a position: 1 in Llama 4, and 0 in Ministral 3.
            inner: Position encoding that is applied first, or None.
        """

        head_dim: int = interface(default=REQUIRED)
        num_heads: int = interface(default=REQUIRED)
        interval: int = setting(default=8192, ge=1)
        scale: float = setting(default=0.1, ge=0)
        shift: int = setting(default=1, ge=0, hide_default=True)
        inner: Node[PositionEncoding] | None = setting(default=None, hide_default=True)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        if cfg.inner is not None:
            self.inner = self.child(cfg.inner, rngs=rngs, head_dim=cfg.head_dim, num_heads=cfg.num_heads)

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scale queries [B, S, N, H] at positions int32 [B or 1, S], and return them with the keys [B, S, K, H].

        The factor is float32.
        """
        if self.cfg.inner is not None:
            query, key = self.inner(query, key, positions)
        count = jnp.floor((positions.astype(jnp.float32) + self.cfg.shift) / self.cfg.interval)
        factor = 1 + self.cfg.scale * jnp.log1p(count)
        return (query.astype(jnp.float32) * factor[:, :, None, None]).astype(query.dtype), key

    def score_bias(self) -> Bias | None:
        """Return the score bias of `inner`, if it has one."""
        return None if self.cfg.inner is None else bias_of(self.inner)
