"""Scales from the largest magnitudes of the latest steps (delayed scaling)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.compose import Functional
from axlearn_core.config import check, find, flatten, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.remat import Remat
from axlearn_plugins_quantization.feature import Quantization
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from support.quantized_maps import FP8, away, build, far, products, train

DELAYED = Quantization(format="fp8", history=4)


@pytest.fixture
def layer():
    return build(QuantizedLinear.Config(**FP8, history=3))


def inputs(largest):
    x = jax.random.normal(jax.random.key(1), (3, 40, 96))
    return x * (largest / jnp.max(jnp.abs(x)))


def test_the_history_has_the_newest_first_and_forgets(layer):
    for largest in (1.0, 4.0, 2.0, 3.0):
        layer(inputs(largest))
    np.testing.assert_allclose(layer.activation_magnitudes[...], [3.0, 2.0, 4.0], rtol=1e-6)
    np.testing.assert_allclose(layer.weight_magnitudes[...], jnp.max(jnp.abs(layer.weight[...])), rtol=1e-6)


def test_evaluation_reads_the_history_and_leaves_it(layer):
    layer(inputs(2.0))
    layer.eval()
    layer(inputs(5.0))
    np.testing.assert_allclose(layer.activation_magnitudes[...], [2.0, 0.0, 0.0], rtol=1e-6)


def test_the_first_step_has_scales_of_its_own_and_values_are_close(layer):
    exact, x = build(Linear.Config()), inputs(3.0)
    for _ in range(2):  # scaled by its own magnitudes, then by the equal ones of the previous step
        assert 1e-4 < away(layer(x), exact(x)) < 0.045


def test_what_is_larger_than_the_history_saturates(layer):
    one = jnp.zeros((1, 96)).at[0, 0].set(1.0)
    expected = layer(one)
    np.testing.assert_allclose(layer(10 * one), expected, rtol=1e-6)  # the largest magnitude in the history is 1
    assert away(layer(10 * one), 10 * build(Linear.Config())(one)) < 0.045  # now the history contains 10


@pytest.mark.slow
def test_gradients_are_close():
    exact, close = build(Linear.Config()), build(QuantizedLinear.Config(**FP8, history=3))
    x, to = inputs(3.0), jax.random.normal(jax.random.key(2), (3, 40, 4, 32))

    def gradient(layer):
        of_layer, of_x = nnx.grad(lambda layer, x: jnp.sum(layer(x) * to), argnums=(0, 1))(layer, x)
        return of_layer["weight"].get_value(), of_x

    for one, other in zip(gradient(close), gradient(exact), strict=True):
        assert 1e-4 < away(one, other) < 0.08


def test_all_three_products_are_of_quantized_numbers_with_one_scale(layer):
    graph, state = nnx.split(layer)

    def gradients(state, x):
        return nnx.grad(lambda layer, x: jnp.sum(layer(x)), argnums=(0, 1))(nnx.merge(graph, state), x)

    actual = products(gradients, state, jnp.ones((2, 5, 96)))
    assert sorted(actual) == [("float8_e4m3fn",) * 2, *[("float8_e5m2", "float8_e4m3fn")] * 2]


def test_the_feature_takes_it(toy, batch):
    result = DELAYED.apply(toy())
    assert {n.history for n in find(result, QuantizedLinear).values()} == {4}
    assert DELAYED.apply(result) == result
    again = Quantization(gradients=False).apply(result)
    assert {n.history for n in find(again, QuantizedLinear).values()} == {4}
    assert "history" not in "".join(flatten(Quantization(format="fp8").apply(toy())))
    model = Functional.from_config(result.model)
    assert model.abstract == Functional.from_config(toy().model).abstract  # the parameters of the plain model
    kinds = products(lambda p, v: model.bind(p, v).loss(batch)[0], model.abstract, model.variables)
    assert kinds.count(("float8_e4m3fn", "float8_e4m3fn")) == 7


def test_a_program_says_that_its_microbatches_are_mathematics(toy):
    reasons = Functional.from_config(DELAYED.apply(toy()).model).batch_dependence
    assert len(reasons) == 7
    assert all("largest magnitude in the batch" in reason for reason in reasons)
    assert not Functional.from_config(Quantization(format="fp8").apply(toy()).model).batch_dependence


@pytest.mark.parametrize(("settings", "problem"), [({"activations": None, "gradients": None}, "no quantized"), (
    {"tile_size": 8}, "tile_size 8")])  # fmt: skip
def test_it_needs_one_scale_for_each_operand(settings, problem):
    with pytest.raises(ConfigError, match=f"(?s)history.*{problem}"):
        check(QuantizedLinear.Config(**settings, history=4))


@pytest.mark.slow
def test_experts_have_no_history(batch):
    config = ax.resolve("quickstart", with_=["moe:num_experts=4", "quantization:format=fp8,history=8"]).config
    model = Functional.from_config(config.model)
    with pytest.raises(RequestError, match=r"quantized experts: the history of 8 steps .*\n.*without the experts"):
        jax.eval_shape(lambda p, v: model.bind(p, v).loss(batch), model.abstract, model.variables)


@pytest.mark.slow
def test_training_with_a_history_follows_float32(toy):
    exact, close = train(toy(), 200)[:60], train(Quantization(format="fp8", history=16).apply(toy()), 60)
    assert not np.array_equal(close, train(Quantization(format="fp8").apply(toy()), 60))
    assert far(close, exact) < 0.03


@pytest.mark.slow
def test_scan_remat_and_a_mesh_of_eight_devices(toy):
    config, remat = DELAYED.apply(toy()), Remat.Config(save=("mlp_hidden",))
    spread = patch(config, {"mesh.shape": {"data": 2, "fsdp": 2, "tensor": 2}, "model.decoder.stack.remat": remat})
    np.testing.assert_allclose(train(config, 3), train(spread, 3, devices=8), rtol=2e-3)
