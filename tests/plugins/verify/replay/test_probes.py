"""Statistics of tensors, and the order of calls in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_plugins_verify.prove.module_calls import patched
from axlearn_plugins_verify.replay.probes import SAMPLE, ProbeRecorder, Statistics, measure_parameters, relative_error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_that_are_not_finite_only_count(dtype):
    value = np.array([[1.0, -2.0, np.nan], [np.inf, 4.0, -np.inf]]).astype(jnp.dtype(dtype))
    measured = Statistics.measure("a", "output", value, (2,))
    assert (measured.smallest, measured.largest, measured.mean, measured.nonfinite) == (-2.0, 4.0, 1.0, 3)
    assert (measured.dtype, measured.shape, measured.magnitude) == (dtype, (2, 3), 4.0)
    assert measured.bad.tolist() == [True, True]
    assert measured.peaks.tolist() == [2.0, 4.0]


def test_tensor_without_finite_values_is_measured():
    measured = Statistics.measure("a", "output", np.full((2, 2), np.nan))
    assert (measured.smallest, measured.largest, measured.nonfinite, measured.bad) == (0.0, 0.0, 4, None)


def test_large_tensors_are_sampled():
    measured = Statistics.measure("a", "output", np.ones((300, 301), np.float32))
    assert 0 < len(measured.sample) <= SAMPLE
    other = Statistics.measure("a", "output", np.full((300, 301), 1.5, np.float32))
    assert relative_error(other, measured) == pytest.approx(0.5)
    assert relative_error(measured, measured) == 0.0


def test_gradients_of_stacks_are_measured_by_layer():
    stack = np.stack([np.ones((2, 3)), np.full((2, 3), np.nan)], axis=1)
    measured = measure_parameters({"a.weight": stack, "b.weight": np.ones(2)}, {"a.weight": 1})
    assert [(s.layer, s.shape, s.nonfinite) for s in measured] == [
        ("a.weight[layer 0]", (2, 3), 0), ("a.weight[layer 1]", (2, 3), 6), ("b.weight", (2,), 0)
    ]  # fmt: skip


class Block(nnx.Module):
    def __init__(self, *stacked):
        self.scale = nnx.Param(jnp.ones(stacked))

    def __call__(self, x):
        return x * self.scale.get_value()


class Model(nnx.Module):
    """Two blocks, and a loop over a stack of three."""

    def __init__(self):
        self.first, self.second, self.layer = Block(), Block(), Block(3)

    def __call__(self, x):
        x = self.second(self.first(x))
        graph, state = nnx.split(self.layer)
        return jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x * 2), None), x, state)[0]


@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_calls_in_a_loop_have_an_index(what):
    model, mesh = Model(), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    recorder = ProbeRecorder(model, (2,), what, mesh)

    def run(x):
        return jnp.sum(model(x))

    with patched(recorder):
        function = jax.jit(run if what == "outputs" else jax.grad(run)).lower(jnp.ones(2)).compile()
    for factor in (1, 3):  # a recorder serves several executions
        function(jnp.full(2, factor, jnp.float32))
        measured = [(s.layer, s.tensor, s.largest) for s in recorder.statistics() if s.tensor != "input"]
        outputs = [("first", 1), ("second", 1), ("layer.0", 2), ("layer.1", 4), ("layer.2", 8), ("", 8)]
        gradients = [("", 1), ("layer.2", 1), ("layer.1", 2), ("layer.0", 4), ("second", 8), ("first", 8)]
        if what == "outputs":
            assert measured == [(layer, "output", factor * value) for layer, value in outputs]
        else:
            assert measured == [(layer, "gradient of output", value) for layer, value in gradients]


@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_second_call_of_a_model_has_its_own_layers(what):
    model, mesh = Model(), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    recorder = ProbeRecorder(model, (2,), what, mesh)

    def run(x):
        return jnp.sum(model(x)) + jnp.sum(jax.lax.stop_gradient(model(-x)))

    with patched(recorder):
        jax.eval_shape(run, jnp.ones(2))  # this trace never runs
        jax.jit(run if what == "outputs" else jax.grad(run))(jnp.ones(2))
    layers = [
        (s.layer, s.tensor)
        for s in recorder.statistics()
        if s.layer.startswith("layer.") and not s.tensor.startswith("input")
    ]
    first = [(f"layer.{i}", "output") for i in range(3)]
    if what == "outputs":
        assert layers == [*first, *((layer, "output of call 2") for layer, _ in first)]
    else:
        assert layers == [(layer, "gradient of output") for layer, _ in first[::-1]]


def test_replaced_calls_are_restored():
    before = Block.__call__
    with patched(ProbeRecorder(Model(), (2,), "outputs", jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))):
        assert Block.__call__ is not before
    assert Block.__call__ is before
