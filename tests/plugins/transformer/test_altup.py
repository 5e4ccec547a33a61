"""Alternating updates: formulas, and layers and decoders that do not fit each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.layer import Precision
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.altup import AltUp, AltUpDecoder, AltUpLayer, Laurel
from axlearn_plugins_transformer.kernels.gated_linear_unit import SparseForm
from axlearn_plugins_transformer.transformer import TransformerLayer

SMALL = {"model.vocab_size": 64, "model.decoder.num_layers": 2, "model.decoder.hidden_dim": 16}


def model(layer, **changes):
    quick = resolve("quickstart", set=SMALL).config.model
    attention = patch(quick.decoder.layer.attention, {"num_heads": 4, "num_kv_heads": 2})
    layer = patch(layer, {"attention": attention, "feed_forward.hidden_dim": 24})
    decoder = AltUpDecoder.Config(num_layers=2, hidden_dim=16, layer=layer, **changes)
    return patch(quick, {"decoder": decoder})


def test_updates_are_their_formulas():
    rng = np.random.default_rng(0)
    part = AltUp.Config(num_streams=3, coefficient_clip=0.5).build(input_dim=8, rngs=nnx.Rngs(0), precision=Precision())
    for parameter in (part.prediction, part.correction, part.norm.weight):
        parameter.set_value(jnp.asarray(rng.standard_normal(parameter.shape), jnp.float32))
    streams, output = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 4, 8), (2, 4, 8)))
    weight, router = np.asarray(part.norm.weight[...]), np.asarray(part.router.weight[...])

    def route(x):
        return np.tanh(x / np.sqrt((x**2).mean(-1, keepdims=True) + part.norm.cfg.eps) * weight / 8 @ router)

    prediction, correction = (np.clip(p[...], -0.5, 0.5) for p in (part.prediction, part.correction))
    coefficients = np.einsum("bsm,mji->bsji", route(streams[0]), prediction)
    predicted = streams + np.einsum("bsji,ibsd->jbsd", coefficients, streams)
    np.testing.assert_allclose(part.predict(jnp.asarray(streams)), predicted, rtol=1e-5, atol=1e-5)
    gains = 1 + np.einsum("bsm,mj->jbs", route(output), correction)
    corrected = predicted + gains[..., None] * (output - predicted[0])
    np.testing.assert_allclose(
        part.correct(jnp.asarray(predicted), jnp.asarray(output)), corrected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("sparsity", [0.3, 0.95])
def test_a_sparse_form_zeroes_the_given_share(sparsity):
    gate = jnp.asarray(np.random.default_rng(1).normal(3, 2, (4, 20_000)), jnp.float32)
    result = SparseForm(sparsity=sparsity).build()(gate, jnp.ones_like(gate), lambda x: x)
    np.testing.assert_allclose((result == 0).mean(-1), sparsity, atol=0.01)
    np.testing.assert_allclose(result.max(-1), gate.max(-1) - jnp.quantile(gate, sparsity, axis=-1), rtol=0.02)


@pytest.mark.slow
def test_a_scan_computes_what_unrolled_layers_compute():
    losses = []
    for mode in ("scan", "unrolled"):
        functional = Functional.from_config(patch(model(AltUpLayer.Config()), {"decoder.stack.mode": mode}))
        params = functional.init(jax.random.key(0))
        tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)

        def loss(params, functional=functional, tokens=tokens):
            hidden, _ = functional.bind(params).hidden_states({"tokens": tokens})
            return jnp.square(hidden[:, -1]).sum() + jnp.sin(hidden).sum()

        losses.append(jax.jit(jax.value_and_grad(loss))(params))
    (one, gradients), (other, others) = losses
    np.testing.assert_allclose(one, other, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, others[path], rtol=1e-3, atol=1e-5, err_msg=path)
        assert np.any(gradient != 0), path


def test_layers_and_decoders_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="an altup-decoder needs layers with the same number of streams"):
        Functional.from_config(model(TransformerLayer.Config()))
    quick = resolve("quickstart", set=SMALL).config.model
    layer = AltUpLayer.Config(attention=quick.decoder.layer.attention, laurel=Laurel.Config(rank=2))
    functional = Functional.from_config(patch(quick, {"decoder.layer": layer}))
    batch = {"tokens": np.zeros((1, 4), np.int32)}
    with pytest.raises(RequestError, match="needs the streams of an altup-decoder"):
        jax.eval_shape(lambda params: functional.bind(params).hidden_states(batch), functional.abstract)
    (problem,) = AltUpLayer.Config(attention=None).validate()
    assert problem.message == "altup-layer requires attention"
