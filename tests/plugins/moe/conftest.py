import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Precision
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_transformer.kernels.gated_linear_unit import activation_function, gated_form

QUICK = {"xla_backend_optimization_level": 0}  # most of the time of these tests would go into compiling


def parameters(layer):
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(layer))}


@pytest.fixture
def normal():
    return lambda *shape, seed=0: jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@functools.cache
def _built(cfg, width, precision):
    def make():
        return cfg.build(input_dim=width, rngs=nnx.Rngs(0), precision=precision)

    graph = nnx.split(nnx.eval_shape(make))[0]
    return graph, jax.jit(lambda: nnx.split(make())[1], compiler_options=QUICK)()


@pytest.fixture
def build():
    """Return a function that builds a layer of width 16 and hidden size 24. Parameters are cached per session."""

    def build(dtype="float32", params="float32", width=16, **settings):
        cfg = MixtureOfExperts.Config(**{"hidden_dim": 24, **settings})
        return nnx.merge(*_built(cfg, width, Precision(params, dtype)))

    return build


@functools.partial(jax.jit, static_argnums=(0, 4), compiler_options=QUICK)
def _grads(graph, state, x, probe, call):
    def loss(state, x):
        with summaries.collect() as collector:
            layer = nnx.merge(graph, state)
            y = layer(x) if call is None else call(layer, x)
        total = jnp.sum(y * probe) + sum(collector.losses.values(), start=jnp.float32(0))
        return total, (y, collector.losses, summaries.get_scalars(collector.summaries))

    return jax.grad(loss, (0, 1), has_aux=True)(state, x)


@pytest.fixture
def run():
    """(layer, x) -> output and summaries, compiled."""

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def call(graph, state, x):
        with summaries.collect() as collector:
            y = nnx.merge(graph, state)(x)
        return y, summaries.get_scalars(collector.summaries)

    return lambda layer, x: call(*nnx.split(layer), x)


@pytest.fixture
def grads():
    """(layer, x, probe, call) -> output, losses, summaries, gradients of `sum(output * probe) + losses` by name and x."""

    def grads(layer, x, probe, call=None):
        (by_state, by_x), (y, losses, reported) = _grads(*nnx.split(layer), x, probe, call)
        results = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(by_state)}
        return y, losses, reported, results | {"x": by_x}

    return grads


@pytest.fixture
def naive():
    """Apply every expert to every token and weigh the results. The routing is that of the layer."""
    return _naive


def _one(maps, e, x):
    """Apply the projection of one expert to x."""
    y = x @ maps.weight[e]
    return y + maps.bias[e][None, None] if maps.cfg.bias else y


def _naive(layer, x):
    routing = layer.router(x)
    length, cfg = x.shape[1], layer.cfg
    act, form = activation_function(cfg.activation), gated_form(cfg.form)
    token = routing.token
    if token is None:
        token = jnp.broadcast_to(jnp.arange(routing.expert.shape[1])[None] % length, routing.expert.shape)
    y = jnp.zeros_like(x)
    for e in range(cfg.num_experts):
        expert_weight = jnp.where(routing.expert == e, routing.weight, 0.0)
        weight = jnp.sum(
            jnp.where(token[:, None] == jnp.arange(length)[None, :, None], expert_weight[:, None], 0.0), -1
        )
        chosen = jnp.any((token[:, None] == jnp.arange(length)[None, :, None]) & (routing.expert == e)[:, None], -1)
        before, after = (weight, chosen) if cfg.weigh_inputs else (jnp.ones_like(weight), weight)
        rows = x * before[..., None]
        up = _one(layer.up, e, rows)
        hidden = act(up) if layer.gate is None else form(_one(layer.gate, e, rows), up, act)
        y = y + after[..., None] * _one(layer.down, e, hidden)
    if cfg.shared is None:
        return y
    shared = layer.shared(x)
    return y + (shared if cfg.shared_gate is None else jax.nn.sigmoid(layer.shared_gate(x)) * shared)


@pytest.fixture
def close():
    """Assert that trees of arrays agree, relative to each array's norm."""

    def close(a, b, tolerance=1e-5):
        assert a.keys() == b.keys()
        for name in a:
            actual, expected = np.asarray(a[name]), np.asarray(b[name])
            assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected), name

    return close
