"""Error bounds: rounding to n levels has a uniform error of up to half a step, so 1 / (2 n sqrt(3)) of the largest value.

The largest of some hundred normal numbers is about three standard deviations, so an int8 tensor has a relative error of
3 / (254 sqrt(3)) = 0.7%, and a product of two has 1%. e4m3 has 3 mantissa bits: an error of at most 1/16, 2.6% in the root mean
square, and 3.7% for a product of two. e5m2 has 2 mantissa bits, which doubles the errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.compose import Functional
from axlearn_core.config import check, find, patch
from axlearn_core.errors import ConfigError, PluginError, RequestError
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.remat import Remat
from axlearn_core.plugins.registry import registry
from axlearn_plugins_moe.dispatch import DroplessDispatch
from axlearn_plugins_moe.experts import BatchedProduct, GroupedProduct
from axlearn_plugins_moe.feature import MoE
from axlearn_plugins_quantization import library
from axlearn_plugins_quantization.feature import Quantization
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from support.quantized_maps import FP8, INT8, QUICK, away, build, far, products, train

ATTENTION = "model.decoder.layer.attention"


@pytest.mark.slow_cases("inputs1-outputs1-settings0-0.013-0.013")
@pytest.mark.parametrize(("settings", "forward", "backward"), [(INT8, 0.013, 0.013), (FP8, 0.045, 0.08)])
@pytest.mark.parametrize(("inputs", "outputs"), [((96,), (4, 32)), ((4, 24), (80,))])
def test_values_and_gradients_are_close(settings, forward, backward, inputs, outputs):
    exact, close = build(Linear.Config(), inputs, outputs), build(QuantizedLinear.Config(**settings), inputs, outputs)
    assert np.array_equal(exact.weight[...], close.weight[...])
    x = jax.random.normal(jax.random.key(1), (3, 40, *inputs))
    to = jax.random.normal(jax.random.key(2), (3, 40, *outputs))

    def gradients(layer):
        graph, state = nnx.split(layer)

        def loss(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(y * to), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), compiler_options=QUICK)(state, x)

    ((_, y), (of_weight, of_x)), ((_, y_close), (of_weight_close, of_x_close)) = gradients(exact), gradients(close)
    assert 1e-4 < away(y_close, y) < forward
    assert 1e-4 < away(of_x_close, of_x) < backward
    assert 1e-4 < away(of_weight_close["weight"].get_value(), of_weight["weight"].get_value()) < backward


def test_without_quantized_gradients_the_backward_pass_is_exact():
    exact, close = build(Linear.Config()), build(QuantizedLinear.Config(gradients=None))
    x = jax.random.normal(jax.random.key(1), (5, 96))
    one, two = (jax.grad(lambda x, m=m: jnp.sum(m(x) ** 1))(x) for m in (exact, close))
    np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize(("settings", "kinds"), [(INT8, {("int8", "int8")}), (
    FP8, {("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")})])  # fmt: skip
def test_all_three_products_are_of_quantized_numbers(settings, kinds):
    layer = build(QuantizedLinear.Config(**settings))
    graph, state = nnx.split(layer)
    actual = products(jax.grad(lambda s, x: jnp.sum(nnx.merge(graph, s)(x)), (0, 1)), state, jnp.ones((2, 5, 96)))
    assert len(actual) == 3
    assert set(actual) == kinds


@pytest.mark.slow
def test_bias_dtype_and_tiles():
    layer = build(QuantizedLinear.Config(bias=True, tile_size=24))
    layer.bias.set_value(jnp.full((4, 32), 2.0))
    x = jax.random.normal(jax.random.key(0), (3, 96))
    plain = jnp.einsum("bd,dnh->bnh", x, layer.weight[...]) + 2.0
    assert away(layer(x), plain) < 0.012
    half = QuantizedLinear.Config(dtype="bfloat16")
    assert build(half)(x).dtype == jnp.bfloat16


@pytest.mark.slow
def test_training_in_int8_follows_float32(toy):
    """Losses stay within 2% for 200 steps, also with a quantized backward pass."""
    exact, close = train(toy(), 200), train(Quantization().apply(toy()), 200)
    assert exact[-10:].mean() < 0.85 * exact[0]
    assert not np.array_equal(exact, close)
    assert far(close, exact) < 0.02


@pytest.mark.slow
def test_training_in_fp8_follows_float32(toy):
    exact, close = train(toy(), 200)[:60], train(Quantization(format="fp8").apply(toy()), 60)
    assert not np.array_equal(exact, close)
    assert far(close, exact) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "steps", "bound"), [(Quantization(), 100, 0.02), (Quantization(format="fp8"), 60, 0.03)]
)
def test_training_experts_follows_float32(toy, feature, steps, bound):
    """Losses stay close even if rounding sends a token to other experts."""
    experts = MoE(num_experts=4, top_k=2).apply(toy())
    exact, close = train(experts, 100)[:steps], train(feature.apply(experts), steps)
    assert exact[-10:].mean() < 0.9 * exact[0]
    assert not np.array_equal(exact, close)
    assert far(close, exact) < bound


@pytest.mark.fast_cases("None-settings1-0.045-0.08", "None-settings2-0.013-0.0")
@pytest.mark.parametrize(("settings", "forward", "backward"), [(INT8, 0.013, 0.013), (FP8, 0.045, 0.08), (
    {"gradients": None}, 0.013, 0.0)])  # fmt: skip
@pytest.mark.parametrize("sizes", [None, (100, 0, 60)])
def test_products_of_groups_are_close(settings, forward, backward, sizes):
    """The error bounds of one product apply to groups. Rows after the last group must not affect the scales."""
    rule = library.Rule(**{**INT8, **settings})
    exact = BatchedProduct() if sizes is None else GroupedProduct(jnp.asarray(sizes))
    dice = np.random.default_rng(0)
    rows = (3, 64) if sizes is None else (200,)
    shapes = (*rows, 48), (3, 48, 40), (*rows, 40)
    x, weights, to = (jnp.asarray(dice.normal(size=shape), jnp.float32) for shape in shapes)
    if sizes is not None:
        x, to = (a.at[sum(sizes) :].multiply(1e6) for a in (x, to))

    def gradients(product):
        def loss(x, weights):
            y = product(x, weights) if sizes is None else product(x, weights)[: sum(sizes)]
            return jnp.sum(y * to[: y.shape[0]]), y

        (of_x, of_weights), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True), compiler_options=QUICK)(x, weights)
        return y, of_x, of_weights

    actual = gradients(lambda x, w: library.grouped_product(rule, x, w, exact))
    for close, true, bound in zip(actual, gradients(exact), (forward, backward, backward), strict=True):
        assert away(close, true) <= bound
    assert away(actual[0], gradients(exact)[0]) > 1e-4


@pytest.mark.fast_cases("capacity-dispatch")
@pytest.mark.parametrize("dispatch", ["dropless-dispatch", "capacity-dispatch"])
def test_the_experts_of_a_mixture_are_quantized(batch, dispatch):
    with_ = [f"moe:num_experts=4,dispatch={{type: {dispatch}}}", "quantization", "lora:rank=2,target=model.**"]
    config = ax.resolve("quickstart", with_=with_, set={"model.decoder.num_layers": 1}).config
    result = Functional.from_config(config.model)
    assert result.axes["decoder.layer.feed_forward.up.lora_a"] == ("layers", "experts", "embed", "rank")
    actual = products(lambda p: result.bind(p).loss(batch)[0], result.abstract)
    assert actual.count(("int8", "int8")) == 7
    by_name = patch(config, {"model.decoder.layer.feed_forward.dispatch": DroplessDispatch.Config(kernel="xla")})
    with pytest.raises(RequestError, match=r"quantized experts: the kernel 'xla' of the dispatch"):
        jax.eval_shape(lambda p: Functional.from_config(by_name.model).bind(p).loss(batch), result.abstract)


@pytest.mark.slow
def test_scan_remat_and_a_mesh_of_eight_devices(toy):
    config, remat = Quantization().apply(toy()), Remat.Config(save=("mlp_hidden",))
    spread = patch(config, {"mesh.shape": {"data": 2, "fsdp": 2, "tensor": 2}, "model.decoder.stack.remat": remat})
    np.testing.assert_allclose(train(config, 3), train(spread, 3, devices=8), rtol=2e-3)


def test_the_model_keeps_its_parameters(toy, batch):
    dense, close = (Functional.from_config(c.model) for c in (toy(), Quantization().apply(toy())))
    assert dense.abstract == close.abstract
    assert dense.axes == close.axes
    actual = products(lambda p: close.bind(p).loss(batch)[0], close.abstract)
    assert actual.count(("int8", "int8")) == 7  # query, key, value, output, gate, up, down, in one scanned layer


def test_the_feature_says_what_is_quantized(toy):
    result = Quantization(format="fp8", target="model.**.attention.*").apply(toy())
    nodes = find(result, QuantizedLinear)
    assert set(nodes) == {f"{ATTENTION}.{n}" for n in ("query", "key", "value", "output")}
    assert set(nodes.values()) == {QuantizedLinear.Config(**FP8)}
    assert Quantization(target="model.**.attention.*").in_effect(result)
    assert Quantization(target="model.**.attention.*").apply(result) == result
    both = Quantization(gradients=False).apply(result)
    kinds = {p.rpartition(".")[2]: (n.weights, n.gradients) for p, n in find(both, QuantizedLinear).items()}
    assert kinds["query"] == ("float8_e4m3fn", None)
    assert kinds["up"] == ("int8", None)
    assert Quantization(format="int8").apply(both) == Quantization(format="int8", gradients=False).apply(both)
    with pytest.raises(ConfigError, match=r"does not match any linear map") as error:
        Quantization(target="model.**.atention.*").apply(toy())
    assert error.value.problems[0].nearest[0].startswith(ATTENTION)


def test_what_a_linear_map_was_set_to_stays(toy):
    odd = patch(toy(), {f"{ATTENTION}.query": Linear.Config(bias=True, dtype="bfloat16")})
    query = find(Quantization().apply(odd), f"{ATTENTION}.query")[f"{ATTENTION}.query"]
    assert query == QuantizedLinear.Config(bias=True, dtype="bfloat16")


def test_lora_and_quantization_in_any_order(batch):
    names = ["lora:rank=4", "quantization"]
    one, other = (ax.resolve("quickstart", with_=w).config for w in (names, names[::-1]))
    assert one == other
    assert type(find(one, f"{ATTENTION}.query.base")[f"{ATTENTION}.query.base"]) is QuantizedLinear.Config
    result = Functional.from_config(one.model)
    actual = products(lambda p: result.bind(p).loss(batch)[0], result.abstract)
    assert ("int8", "int8") in actual


def test_gradients_alone_cannot_be_quantized():
    with pytest.raises(ConfigError, match="needs quantized activations"):
        check(QuantizedLinear.Config(activations=None))
    assert check(QuantizedLinear.Config(activations=None, gradients=None))


def test_a_qwix_that_cannot_be_imported_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(PluginError, match=r"(?s)needs qwix, which cannot be imported.*installed: qwix .*jax"):
        library.load.__wrapped__()


def test_all_names_are_registered():
    names = registry()
    assert names.component("quantized-linear") is QuantizedLinear.Config
    assert names.feature("quantization") is Quantization
    assert "quantize" in names.claims["commands"]
