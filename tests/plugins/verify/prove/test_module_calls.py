"""Records of module calls: paths, the order of layers, and the first difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_plugins_verify.prove import module_calls


class Half(nnx.Module):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(()))
        self.first, self.second = Half(2.0), Half(3.0)

    def __call__(self, x):
        return self.second(self.first(x) * self.weight[...])


class Model(nnx.Module):
    """A stack of layers, which a scan rebuilds for each call."""

    def __init__(self, scan):
        self.scan, self.norm = scan, Half(0.5)
        self.layer = nnx.split_rngs(splits=2)(nnx.vmap(Layer, in_axes=0))(nnx.Rngs(0))

    def __call__(self, x):
        graph, state = nnx.split(self.layer)

        def run(x, state):
            return nnx.merge(graph, state)(x), None

        if self.scan:
            x, _ = jax.lax.scan(jax.checkpoint(run), x, state)
        else:
            for i in range(2):
                x, _ = run(x, jax.tree.map(lambda s, i=i: s[i], state))
        return self.norm(x)


PATHS = [
    ("", "input"), ("layer.0", "input"), ("layer.0.first", "input"), ("layer.0.first", "output"),
    ("layer.0.second", "input"), ("layer.0.second", "output"), ("layer.0", "output"),
]  # fmt: skip


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_calls_are_recorded_with_the_index_of_their_layer(scan):
    model, x = Model(scan), jnp.ones((2, 3))
    result, records = module_calls.record_calls(model, jax.jit(lambda x: model(x)), x)
    assert np.asarray(result).tolist() == (18 * np.ones((2, 3))).tolist()
    assert [(r.layer, r.tensor) for r in records[: len(PATHS)]] == PATHS
    assert [(r.layer, r.tensor) for r in records[-3:]] == [("norm", "input"), ("norm", "output"), ("", "output")]
    (second,) = (r for r in records if (r.layer, r.tensor) == ("layer.1.first", "output"))
    assert np.asarray(second.value).tolist() == (12 * np.ones((2, 3))).tolist()
    assert "__call__" in vars(Half), "the class is as it was"
    assert model(x).shape == x.shape
    assert len(records) == 2 * 6 + 4


def test_calls_on_several_devices_belong_to_the_next_layer():
    calls = [("layer.#.a", "output", 1), ("layer.#", "output", 2), ("layer.#", "output", 3), ("layer.#.a", "output", 4)]
    records = module_calls.number_layers(calls, ordered=False)
    assert [(r.layer, r.value) for r in records] == [("layer.0.a", 1), ("layer.0", 2), ("layer.1", 3), ("layer.1.a", 4)]


def record(layer, tensor, *values):
    return module_calls.Record(layer=layer, tensor=tensor, value=np.asarray(values, np.float64))


def test_the_first_difference_is_named():
    one = [record("a", "output", [1.0, 0.0]), record("b.c", "input", [1.0, 1.0]), record("b", "output", [2.0, 2.0])]
    other = [one[0], record("b.c", "input", [1.0, 2.0]), record("b", "output", [9.0, 9.0])]
    difference = module_calls.first_difference(one, other, 0.1)
    assert (difference.layer, difference.tensor) == ("b", "input of c"), "the parent computed the input"
    assert difference.error == pytest.approx(0.5**0.5)
    assert module_calls.first_difference(one, one, 0.1) is None


def test_the_input_of_a_layer_belongs_to_the_parent_of_the_stack():
    one, other = ([record("decoder.layer.0", "input", [x])] for x in (1.0, 2.0))
    difference = module_calls.first_difference(one, other, 0.1)
    assert (difference.layer, difference.tensor) == ("decoder", "input of layer.0")


def test_values_that_cannot_be_compared_are_left_out():
    one, other = [record("a", "output", [1.0, 2.0])], [record("a", "output", [1.0, 2.0, 3.0])]
    assert module_calls.first_difference(one, other, 0.1) is None
    assert module_calls.first_difference(one, other, 0.1, lambda x: x[..., :1], lambda x: x[..., :1] + 1) is not None
    assert module_calls.first_difference(one, [record("b", "output", [5.0])], 0.1) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_differs(bad):
    one, other = [record("a", "output", [1.0, 2.0])], [record("a", "output", [1.0, bad])]
    difference = module_calls.first_difference(one, other, 0.1)
    assert "1 of 2 values are not finite" in difference.detail
    assert module_calls.first_difference(other, other, 0.1) is None


def test_chunks_are_joined_by_module():
    first = [record("a", "output", [[1.0], [2.0]]), record("b", "output", [[1.0]])]
    second = [record("a", "output", [[3.0]])]
    (joined,) = module_calls.join_chunks([first, second])
    assert joined.value.tolist() == [[[1.0], [2.0], [3.0]]]
