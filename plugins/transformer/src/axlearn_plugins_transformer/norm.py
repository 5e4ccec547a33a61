"""Normalization over the last axis."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.initializers import Constant, Initializer
from axlearn_core.nn.layer import Layer, Precision, expand_to
from axlearn_plugins_transformer.kernels import rms_norm


class Norm(Protocol):
    """Normalizes the last axis. It is built with `dim`, `rngs` and `precision`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., dim]."""
        ...


class RMSNorm(Layer):
    """Root-mean-square normalization (Zhang & Sennrich, 2019), computed in float32."""

    @node
    class Config(Layer.Config["RMSNorm"]):
        """Settings for the norm.

        Attributes:
            eps: Constant added to the mean square.
            offset: Constant added to the weight, for models that store the weight around zero (Gemma).
            weight: Learn a weight. Without it, the norm has no parameters (Llama 4).
            kernel: Implementation of the `rms_norm` op. None selects the best one.
            init: Initializer of the weight.
        """

        dim: int = interface(default=REQUIRED)
        eps: float = setting(default=1e-6, gt=0)
        offset: float = 0.0
        weight: bool = setting(default=True, hide_default=True)
        kernel: str | None = setting(default=None, kind="execution")
        init: Node[Initializer] = setting(default=Constant(value=1.0), kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        if cfg.weight:
            self.weight = self.parameter(rngs, cfg.init, (cfg.dim,), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., dim]."""
        cfg = self.cfg
        weight = self.computed(self.weight) if cfg.weight else jnp.ones(cfg.dim, self.precision.compute)
        return rms_norm.RMSNormOp(x, weight, eps=cfg.eps, offset=cfg.offset).run(cfg.kernel)


class LayerNorm(Layer):
    """Layer normalization (Ba et al., 2016), computed in float32."""

    @node
    class Config(Layer.Config["LayerNorm"]):
        """Settings for the norm.

        Attributes:
            eps: Constant added to the variance.
            scale: Learn a scale.
            offset: Constant added to the scale, for models that store the scale around zero (Nemotron).
            bias: Learn a bias.
        """

        dim: int = interface(default=REQUIRED)
        eps: float = setting(default=1e-5, gt=0)
        scale: bool = setting(default=True, hide_default=True)
        offset: float = setting(default=0.0, hide_default=True)
        bias: bool = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        if cfg.scale:
            self.weight = self.parameter(rngs, Constant(value=1.0 - cfg.offset), (cfg.dim,), ("norm",))
        if cfg.bias:
            self.bias = self.parameter(rngs, Constant(), (cfg.dim,), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., dim]."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.cfg.eps)
        y = y.astype(self.precision.compute)
        if self.cfg.scale:
            scale = self.computed(self.weight)
            y = y * expand_to(scale + self.cfg.offset if self.cfg.offset else scale, x.ndim)
        return y + expand_to(self.computed(self.bias), x.ndim) if self.cfg.bias else y
