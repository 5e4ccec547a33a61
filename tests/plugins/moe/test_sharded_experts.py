"""Eight devices compute the same loss, summaries and gradients as one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import Functional
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.kernels import selection
from axlearn_core.nn import sharding
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_moe.dispatch import CapacityDispatch, DroplessDispatch
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import ExpertChoiceRouter, SigmoidRouter, SigmoidScore, SoftmaxRouter
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.kernels.gated_linear_unit import ClampedForm, Swish
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

QUICK = {"xla_backend_optimization_level": 0}


def model(**settings):
    experts = MixtureOfExperts.Config(hidden_dim=24, **{"num_experts": 4, **settings})
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), feed_forward=experts)
    return CausalLM.Config(vocab_size=32, decoder=Decoder.Config(num_layers=2, hidden_dim=16, layer=layer))


def batch():
    tokens = np.random.default_rng(0).integers(0, 32, (8, 17))
    return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def on(cfg, shape):
    """Return (loss, summaries, gradients) on a mesh. An empty shape is one device."""
    functional = Functional.from_config(cfg)
    mesh = Mesh(shape=shape or {"fsdp": 1})
    layout = Layout(make_mesh(mesh, None if shape else jax.devices()[:1]), mesh)
    params, variables = jax.jit(functional.init_arrays, compiler_options=QUICK)(jax.random.key(0))
    dice = np.random.default_rng(1)
    params |= {
        p: jnp.asarray(dice.normal(size=x.shape), x.dtype)
        for p, x in params.items()
        if p.endswith(("gate.bias", "up.bias", "down.bias", "logit_bias", "lora_b"))
    }
    places = {p: layout.sharding(functional.axes[p], s.shape, p) for p, s in functional.abstract.items()}
    params = {p: jax.device_put(x, places[p]) for p, x in params.items()}
    arrays = {k: jax.device_put(v, layout.sharding(("batch", "sequence"), v.shape, k)) for k, v in batch().items()}

    def loss(params, arrays_in):
        with sharding.logical_rules(layout.mesh, layout.rules), selection.use(selection.Selection()):
            return jax.value_and_grad(lambda p: functional.bind(p, variables).loss(arrays_in), has_aux=True)(params)

    (value, summaries), grads = jax.jit(loss, compiler_options=QUICK)(params, arrays)
    return jax.device_get((value, summaries, grads))


CASES = {
    "dropless": {},
    "sigmoid-shared": {"router": SigmoidRouter.Config(), "shared": GatedFeedForward.Config(hidden_dim=8)},
    "capacity": {"dispatch": CapacityDispatch.Config(capacity_factor=1.0)},
    "expert-choice": {"router": ExpertChoiceRouter.Config()},
    "adapted": {n: LoraLinear.Config(rank=2, alpha=0.5) for n in ("gate", "up", "down")},
    "biased": {"up": Linear.Config(bias=True), "down": Linear.Config(bias=True)},
    "gpt-oss": {
        **dict.fromkeys(("gate", "up", "down"), Linear.Config(bias=True)),
        "router": SoftmaxRouter.Config(logit_bias=True),
        "activation": Swish(beta=1.702),
        "form": ClampedForm(limit=0.5),
    },
    "llama4": {
        **dict.fromkeys(("gate", "up", "down"), Linear.Config(bias=True)),
        "dispatch": DroplessDispatch.Config(exchange="all-to-all"),
        "router": SoftmaxRouter.Config(score=SigmoidScore(), normalize=False),
        "shared": GatedFeedForward.Config(hidden_dim=8),
        "shared_gate": Linear.Config(),
        "weigh_inputs": True,
    },
    "ragged": {"dispatch": DroplessDispatch.Config(kernel="xla"), "router": SoftmaxRouter.Config(load_balance=1.0)},
}
MESHES = [
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"expert": 4, "data": 2},
    {"seq": 2, "expert": 2, "tensor": 2},
    {"fsdp": 8},
]


@functools.cache
def alone(case):
    """The results of one device, for all meshes."""
    return on(model(**CASES[case]), {})


def agree(case, mesh):
    loss, summaries, grads = on(model(**CASES[case]), mesh)
    expected, expected_summaries, expected_grads = alone(case)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for name, value in expected_summaries.items():
        np.testing.assert_allclose(summaries[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, value in expected_grads.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


# Each case on one mesh; all on all in the exhaustive set.
PLACED = [
    pytest.param(case, mesh, marks=pytest.mark.slow if n % len(MESHES) == mesh else pytest.mark.exhaustive)
    for n, case in enumerate(CASES)
    for mesh in range(len(MESHES))
]


@pytest.mark.parametrize(("case", "mesh"), PLACED)
def test_no_mesh_changes_a_number(case, mesh):
    agree(case, MESHES[mesh])


@jax.custom_vjp
def _product(lhs, rhs, sizes):
    used = (jnp.arange(lhs.shape[0]) < jnp.sum(sizes))[:, None]
    return jnp.where(used, jax.lax.ragged_dot(jnp.where(used, lhs, 0), rhs, sizes), jnp.nan)


def _product_backward(residuals, gradient):
    lhs, rhs, sizes = residuals
    used = (jnp.arange(lhs.shape[0]) < jnp.sum(sizes))[:, None]
    product = jax.vjp(lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, sizes), jnp.where(used, lhs, 0), rhs)[1]
    by_lhs, by_rhs = product(jnp.where(used, gradient, 0))
    return jnp.where(used, by_lhs, jnp.nan), by_rhs, None


_product.defvjp(lambda *operands: (_product(*operands), operands), _product_backward)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["biased", "gpt-oss", "llama4"])
def test_rows_after_the_last_group_reach_no_bias(case, monkeypatch):
    """A kernel may leave anything in these rows and in their gradients. This one leaves NaN."""
    alone(case)
    monkeypatch.setattr(GroupedMatmulOp, "run", lambda op, kernel=None: _product(op.lhs, op.rhs, op.sizes))
    agree(case, MESHES[1])


@pytest.mark.slow
def test_rows_that_the_devices_do_not_divide():
    """Every device has all tokens, and the partial sums of the experts are added."""
    cfg = model()
    layer = cfg.decoder.layer.feed_forward
    functional = Functional.from_config(layer, input_dim=16, precision=Precision())
    params = functional.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 16)).astype(np.float32))
    expected = functional.bind(params)(x)
    mesh = Mesh(shape=MESHES[0])
    layout = Layout(make_mesh(mesh), mesh)
    params = {p: jax.device_put(v, layout.sharding(functional.axes[p], v.shape, p)) for p, v in params.items()}

    def call(params, x):
        with sharding.logical_rules(layout.mesh, layout.rules):
            return functional.bind(params)(x)

    np.testing.assert_allclose(jax.jit(call)(params, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_experts_that_the_mesh_does_not_divide_are_named():
    with pytest.raises(ConfigError) as error:
        on(model(num_experts=3), MESHES[0])
    assert "feed_forward" in str(error.value)
    assert "is not divisible by the mesh axes expert" in str(error.value)
    assert "fix: change mesh.shape" in str(error.value)


def test_expert_parameters_are_sent_in_their_compute_dtype():
    layer = MixtureOfExperts.Config(num_experts=4, hidden_dim=24)
    functional = Functional.from_config(layer, input_dim=16, precision=Precision(compute="bfloat16"))
    mesh = Mesh(shape={"fsdp": 8})
    layout = Layout(make_mesh(mesh), mesh)

    def loss(params, x):
        with sharding.logical_rules(layout.mesh, layout.rules):
            return jnp.sum(functional.bind(params)(x).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((8, 6, 16), jnp.bfloat16)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(functional.abstract, x))
    dtypes = re.findall(r":(\w+)\[[\d,]*\] = (?:all_gather|reduce_scatter)\[", jaxpr)
    assert dtypes == ["bf16"] * 6  # three matrices, and their gradients
