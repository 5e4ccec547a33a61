"""Activations and forms of a gate are slots. Kernels that do not know them are rejected, and bad components are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import Node, check, find, node, patch
from axlearn_core.config.codec import QualifiedNames, encode
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.kernels import selection
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.remat import Remat
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_transformer.attention_variants.interleave import Window
from axlearn_plugins_transformer.feed_forward import GatedFeedForward, PlainFeedForward
from axlearn_plugins_transformer.kernels.gated_linear_unit import (
    ActivationFunction,
    ClampedForm,
    GatedForm,
    GatedLinearUnitOp,
    Swish,
)

GPT_OSS = {"activation": Swish(beta=1.702), "form": ClampedForm()}
BIASED = Linear.Config(bias=True)


@node
class Softsign(Node[ActivationFunction]):
    """An activation of another package."""

    def build(self, **_):
        return lambda x: x / (1 + jnp.abs(x))


@node
class Difference(Node[GatedForm]):
    """A form of another package."""

    def build(self, **_):
        return lambda gate, up, activation: activation(gate) - up


def build(cfg, **offered):
    return cfg.build(rngs=nnx.Rngs(0), precision=Precision(), input_dim=8, **offered)


def call(layer, x):
    graph, state = nnx.split(layer)
    compiled = jax.jit(
        lambda state, x: nnx.merge(graph, state)(x), compiler_options={"xla_backend_optimization_level": 0}
    )
    return compiled(state, jnp.asarray(x))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def set_arrays(layer, scale):
    """Set every parameter to random values. Return them by path, in float64."""
    state = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    for seed, (_, variable) in enumerate(state):
        variable[...] = jnp.asarray(scale * normal(*variable.shape, seed=seed + 1))
    return {".".join(path): np.asarray(v[...], np.float64) for path, v in state}


def test_the_unit_of_gpt_oss():
    layer = build(GatedFeedForward.Config(hidden_dim=12, gate=BIASED, up=BIASED, down=BIASED, **GPT_OSS))
    w, x = set_arrays(layer, 3.0), normal(2, 5, 8)
    gate, up = (x @ w[f"{n}.weight"] + w[f"{n}.bias"] for n in ("gate", "up"))
    assert min(gate.max(), up.max(), -up.min()) > 7  # every bound matters here
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = ((up + 1) * gate / (1 + np.exp(-1.702 * gate))) @ w["down.weight"] + w["down.bias"]
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-4)


def test_components_of_other_packages():
    x = normal(2, 3, 8)
    for cfg in (
        GatedFeedForward.Config(hidden_dim=12, activation=Softsign(), form=Difference()),
        GatedFeedForward.Config(hidden_dim=12, activation="relu", form=ClampedForm(limit=0.5, up_offset=0.0)),
        PlainFeedForward.Config(hidden_dim=12, activation=Softsign()),
    ):
        layer = build(cfg)
        w = set_arrays(layer, 1.0)
        hidden, gate = x @ w["up.weight"], x @ w["gate.weight"] if "gate.weight" in w else None
        if gate is None:
            hidden = hidden / (1 + np.abs(hidden))
        elif cfg.activation == "relu":
            hidden = np.clip(gate, 0, 0.5) * np.clip(hidden, -0.5, 0.5)
        else:
            hidden = gate / (1 + np.abs(gate)) - hidden
        np.testing.assert_allclose(call(layer, x), hidden @ w["down.weight"], rtol=1e-5, atol=1e-5)


def test_adapters_and_remat_tags_work_with_a_form():
    adapted = LoraLinear.Config(rank=2, alpha=2.0)
    layer = build(GatedFeedForward.Config(hidden_dim=12, gate=adapted, **GPT_OSS))
    w, x = set_arrays(layer, 1.0), normal(1, 4, 8)
    gate = np.minimum(x @ (w["gate.weight"] + w["gate.lora_a"] @ w["gate.lora_b"]), 7)
    expected = (np.clip(x @ w["up.weight"], -7, 7) + 1) * gate / (1 + np.exp(-1.702 * gate))
    np.testing.assert_allclose(call(layer, x), expected @ w["down.weight"], rtol=1e-4, atol=1e-4)
    remat = Remat.Config(save=("mlp_gate", "mlp_up", "mlp_hidden", "mlp_out")).build()
    graph, state = nnx.split(layer)
    run = remat.wrap(lambda state, x: nnx.merge(graph, state)(x), in_loop=False)
    jax.eval_shape(run, state, jnp.asarray(x))
    remat.check()


def unit(**options):
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 64, 64), (64, 128), (64, 128)))
    return GatedLinearUnitOp(*arrays, hidden_dim=128, **{"activation": "silu", **options})


def test_only_kernels_that_declare_an_extra_are_selected():
    assert unit().extras() == ()
    assert unit().options() == {"activation": "silu", "plain": True}
    assert unit() != unit(form=ClampedForm()) != unit(form=ClampedForm(limit=6.0))
    assert unit(**GPT_OSS).flops() == unit().flops() == 4 * 2 * 64 * 64 * 128
    context = KernelContext(platform="gpu", target="h100")
    for options, reason in (
        (GPT_OSS, "does not support custom_activation and gated_form"),
        ({"form": ClampedForm()}, "does not support gated_form"),
        ({"activation": Swish()}, "does not support custom_activation"),
    ):
        answers = {
            k.name: selection.refusal(k, unit(**options), context) for k in selection.installed(GatedLinearUnitOp)
        }
        assert answers == {name: None if name == "xla" else reason for name in answers}
        assert {"tokamax-triton", "tokamax-mosaic"} <= answers.keys()
    with (
        selection.use(selection.Selection(platform="gpu", target="h100")),
        pytest.raises(RequestError, match="'tokamax-triton' cannot do this") as error,
    ):
        selection.choose(unit(**GPT_OSS), "tokamax-triton")
    assert "tokamax-triton: does not support custom_activation and gated_form" in str(error.value)


def test_files_name_them_and_omit_the_default():
    path = "model.decoder.layer.feed_forward"
    values = {"activation": {"type": "swish", "beta": 1.702}, "form": {"type": "clamped-form", "limit": 6}}
    cfg = resolve("quickstart", set={f"{path}.{k}": v for k, v in values.items()}).config
    layer = find(cfg, path)[path]
    assert (layer.activation, layer.form) == (Swish(beta=1.702), ClampedForm(limit=6.0))
    encoded = encode(layer, registry())
    assert encoded["form"] == {"type": "clamped-form", "limit": 6.0, "up_offset": 1.0}
    assert encoded["activation"] == values["activation"]
    assert "form" not in encode(GatedFeedForward.Config(), QualifiedNames())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"activation": "swish"}, ["activation", "'swish'", "'relu_squared' or Node[ActivationFunction]"]),
        ({"activation": 3}, ["activation", "3 (int)"]),
        ({"form": "clamped"}, ["form", "'clamped'"]),
    ],
)
def test_wrong_values_are_named(settings, expected):
    with pytest.raises(ConfigError) as error:
        patch(GatedFeedForward.Config(), settings)
    for text in expected:
        assert text in str(error.value)


def test_bounds_and_components_that_build_no_function():
    with pytest.raises(ConfigError, match="limit: out of range"):
        check(ClampedForm(limit=0.0))
    with pytest.raises(ConfigError, match="beta: out of range"):
        check(Swish(beta=-1.0))
    for settings, role in (({"activation": Window()}, "an activation"), ({"form": Window(size=3)}, "a gated form")):
        with pytest.raises(RequestError, match=f"Window cannot be used as {role}") as error:
            build(GatedFeedForward.Config(**settings))(jnp.ones((1, 2, 8)))
        assert "fix: use a component such as" in str(error.value)
