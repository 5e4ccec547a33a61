"""Models with state, written like layers of a plugin, and a few training steps of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core import compose, patch, replace_config
from axlearn_core.config import REQUIRED, interface, node, setting
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.norm import RMSNorm
from support import toy_models

KINDS = ("dropout", "batch-norm", "amax", "router-bias")
FEATURES = {
    "dropout": ("dropout:rate=0.2",),
    "router-bias": ("moe:num_experts=4,top_k=2,router={type: sigmoid-router, rate: 0.01}",),
}
"""Kind -> what makes the model keep state; the other kinds replace a layer."""
STEPS = 3


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
    """A linear map that scales its input by the largest magnitude of the latest steps, as fp8 with delayed scaling does."""

    @node
    class Config(Linear.Config):
        history: int = setting(default=4, ge=1)

    batch_dependence = "takes the largest magnitude of the batch"

    def __init__(self, cfg, *, axes, rngs, precision):
        super().__init__(cfg, axes=axes, rngs=rngs, precision=precision)
        self.amax = Amax(jnp.zeros(cfg.history))
        self.use_running_average = False

    def __call__(self, x):
        largest = jnp.max(self.amax[...])
        scale = jnp.where(largest > 0, largest, 1.0).astype(x.dtype)
        if not self.use_running_average:
            newest = jnp.max(jnp.abs(x)).astype(jnp.float32)
            self.amax[...] = jnp.concatenate([newest[None], self.amax[...][:-1]])
        return super().__call__(x / scale)


def with_state(tree, kind):
    """An experiment whose model keeps state of a kind."""
    if kind == "batch-norm":
        return replace_config(tree, RMSNorm, BatchNorm.Config(), drop=("eps",))
    if kind == "amax":
        return patch(tree, {"model.decoder.layer.feed_forward.down": WatchedLinear.Config()})
    return tree


@functools.cache
def config(kind, *features):
    """A small language model with state of a kind and with features."""
    tree = patch(toy_models.small("llama2-7b"), {"model.dtype": "float32"})
    own = [f for f in FEATURES.get(kind, ()) if not any(g.partition(":")[0] == f.partition(":")[0] for g in features)]
    if used := [*features, *own]:
        tree = resolve(tree, with_=used).config
    return with_state(tree, kind)


@functools.cache
def trained(kind, *features, mode="scan", mesh=(), steps=STEPS):
    """(losses, variables, the final state, the program) of a few steps on different batches."""
    return train(config(kind, *features), mode=mode, mesh=mesh, steps=steps)


def train(cfg, *, mode="scan", mesh=(), steps=STEPS):
    """`trained` of any config; a mode of None keeps its own stack."""
    cfg = patch(cfg, {"mesh.shape": dict(mesh)} | ({"model.decoder.stack.mode": mode} if mode else {}))
    program = compose(cfg, jax.devices() if mesh else jax.devices()[:1])
    with toy_models.quick_to_compile():
        state = program.init(seed=0)
        losses = []
        for step in range(steps):
            state, scalars = program.train_step(state, program.put(toy_models.batch(step)))
            losses.append(float(scalars["loss"]))
    return losses, jax.device_get(state.variables), state, program


def same(one, other, tolerance=1e-5):
    """Equal losses and variables, but for how sums are rounded."""
    np.testing.assert_allclose(one[0], other[0], rtol=tolerance)
    assert one[1].keys() == other[1].keys()
    for path, value in one[1].items():
        np.testing.assert_allclose(value, other[1][path], rtol=tolerance, atol=tolerance, err_msg=path)
