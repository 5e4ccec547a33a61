"""Layers that keep state, as a plugin would write them: batch statistics from flax, and a history of magnitudes."""

import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, interface, node, setting
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.linear import Linear


class BatchNorm(Layer):
    """A norm: `nnx.BatchNorm` over rows and positions."""

    @node
    class Config(Layer.Config["BatchNorm"]):
        dim: int = interface(default=REQUIRED)
        momentum: float = setting(default=0.9, ge=0, lt=1)

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.norm = nnx.BatchNorm(cfg.dim, momentum=cfg.momentum, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class Amax(nnx.Variable):
    """The largest magnitudes of the latest steps."""


class WatchedLinear(Linear):
    """A linear map that keeps the largest magnitudes of its input, as fp8 with delayed scaling does."""

    @node
    class Config(Linear.Config):
        history: int = setting(default=4, ge=1)

    batch_dependence = "takes the largest magnitude of the batch"

    def __init__(self, cfg, *, axes, rngs, precision):
        super().__init__(cfg, axes=axes, rngs=rngs, precision=precision)
        self.amax = Amax(jnp.zeros(cfg.history))
        self.use_running_average = False

    def __call__(self, x):
        if not self.use_running_average:
            newest = jnp.max(jnp.abs(x)).astype(jnp.float32)
            self.amax[...] = jnp.concatenate([newest[None], self.amax[...][:-1]])
        return super().__call__(x)
