"""The layer against a plain loop over experts, values and gradients, regardless of the router, dispatch and kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import Scaled, check
from axlearn_core.errors import ConfigError
from axlearn_core.kernels import selection
from axlearn_core.nn import summaries
from axlearn_core.nn.initializers import VarianceScaling
from axlearn_core.nn.layer import Context
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.remat import Remat
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_moe.dispatch import CapacityDispatch, DroplessDispatch
from axlearn_plugins_moe.grouped_matmul import XLA_BLOCKED, GroupedMatmulOp
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import ExpertChoiceRouter, SigmoidRouter, SigmoidScore, SoftmaxRouter
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.kernels.gated_linear_unit import ClampedForm, Swish
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_transformer.transformer import TransformerLayer

BIASED = Linear.Config(bias=True)
ROUTERS = {
    "softmax": {},
    "switch": {"top_k": 1, "activation": "gelu", "gate": None, "up": BIASED, "down": BIASED},
    "sigmoid": {"router": SigmoidRouter.Config(scale=2.5, load_balance=0.01), "top_k": 3},
    "expert-choice": {"router": ExpertChoiceRouter.Config(z_loss=0.1), "shared": GatedFeedForward.Config(hidden_dim=8)},
    "gpt-oss": {
        **dict.fromkeys(("gate", "up", "down"), BIASED),
        "router": SoftmaxRouter.Config(logit_bias=True, load_balance=0.0, z_loss=0.0),
        "activation": Swish(beta=1.702),
        "form": ClampedForm(limit=0.5),
        "top_k": 3,
    },
    "llama4": {
        "router": SoftmaxRouter.Config(score=SigmoidScore(), normalize=False, load_balance=0.0, z_loss=0.0),
        "shared": GatedFeedForward.Config(hidden_dim=8),
        "top_k": 1,
        "weigh_inputs": True,
    },
    "qwen3-next": {"shared": GatedFeedForward.Config(hidden_dim=8), "shared_gate": Linear.Config()},
    "weighed-biased": {
        **dict.fromkeys(("gate", "up", "down"), BIASED),
        "router": ExpertChoiceRouter.Config(),
        "weigh_inputs": True,
    },
}
DISPATCHES = {
    "dropless": DroplessDispatch.Config(kernel="xla"),
    "capacity": CapacityDispatch.Config(capacity_factor=8.0),  # room for every token in every expert
}


@pytest.mark.fast_cases("switch-capacity")
@pytest.mark.parametrize(
    ("router", "dispatch"),
    [
        ("softmax", "dropless"),
        ("switch", "capacity"),
        ("expert-choice", "dropless"),
        *(
            pytest.param(router, dispatch, marks=pytest.mark.slow)
            for router, dispatch in (
                ("softmax", "capacity"),
                ("switch", "dropless"),
                ("sigmoid", "dropless"),
                ("sigmoid", "capacity"),
                ("expert-choice", "capacity"),
                ("gpt-oss", "dropless"),
                ("gpt-oss", "capacity"),
                ("llama4", "dropless"),
                ("llama4", "capacity"),
                ("qwen3-next", "dropless"),
                ("weighed-biased", "dropless"),
                ("weighed-biased", "capacity"),
            )
        ),
    ],
)
def test_it_is_the_sum_over_experts(router, dispatch, build, naive, grads, close, normal):
    layer = build(dispatch=DISPATCHES[dispatch], **ROUTERS[router])
    randomize_biases(layer, normal)
    x, probe = normal(2, 37, 16), normal(2, 37, 16, seed=1)
    y, losses, reported, gradients = grads(layer, x, probe)
    expected, expected_losses, _, expected_grads = grads(layer, x, probe, naive)
    close({"y": y}, {"y": expected})
    assert losses == expected_losses
    close(gradients, expected_grads)
    assert reported.get("dropped_assignments", 0.0) == 0.0


def randomize_biases(layer, normal):
    """Set the biases of experts and of the router, which start at zero."""
    for seed, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
        if path[-1] in ("bias", "logit_bias"):
            variable[...] = normal(*variable.shape, seed=seed)


def silu(x):
    return x / (1 + np.exp(-x))


def test_the_experts_of_gpt_oss(build, run, normal):
    """Token by token in NumPy, as in the reference code: the softmax covers only the chosen experts."""
    layer, x = build(**{**ROUTERS["gpt-oss"], "form": ClampedForm(limit=2.0)}), normal(2, 7, 16)
    randomize_biases(layer, normal)
    w = {".".join(p): 3 * np.asarray(v[...], np.float64) for p, v in nnx.to_flat_state(nnx.state(layer))}
    for path, variable in nnx.to_flat_state(nnx.state(layer)):
        variable[...] = jnp.asarray(w[".".join(path)], jnp.float32)
    expected, bounded = np.zeros((2, 7, 16)), 0
    for place in np.ndindex(2, 7):
        token = np.asarray(x[place], np.float64)
        logits = token @ w["router.weight"] + w["router.logit_bias"]
        chosen = np.argsort(-logits)[:3]
        share = np.exp(logits[chosen] - logits[chosen].max())
        for e, weight in zip(chosen, share / share.sum(), strict=True):
            gate, up = (token @ w[f"{n}.weight"][e] + w[f"{n}.bias"][e] for n in ("gate", "up"))
            bounded += (gate > 2).sum() + (np.abs(up) > 2).sum()
            gate, up = np.minimum(gate, 2), np.clip(up, -2, 2)
            hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            expected[place] += weight * (hidden @ w["down.weight"][e] + w["down.bias"][e])
    assert bounded > 100
    np.testing.assert_allclose(run(layer, x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_experts_of_llama_4_and_qwen3_next(build, run, normal):
    """The weight multiplies the input of an expert, and a sigmoid per token multiplies the output of the shared expert."""
    x = normal(1, 5, 16)
    for name in ("llama4", "qwen3-next"):
        layer = build(**ROUTERS[name])
        layer.router.weight[...] = normal(16, 8)
        w = {".".join(p): np.asarray(v[...], np.float64) for p, v in nnx.to_flat_state(nnx.state(layer))}
        for t, y in enumerate(np.asarray(run(layer, x)[0])[0]):
            token = np.asarray(x[0, t], np.float64)
            logits = token @ w["router.weight"]
            shared = (silu(token @ w["shared.gate.weight"]) * (token @ w["shared.up.weight"])) @ w["shared.down.weight"]
            if name == "llama4":
                chosen = [np.argmax(logits)]
                inputs, weights = token / (1 + np.exp(-logits[chosen[0]])), [1.0]
            else:
                shared /= 1 + np.exp(-(token @ w["shared_gate.weight"]))
                chosen, inputs = np.argsort(-logits)[:2], token
                weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
            for e, weight in zip(chosen, weights, strict=True):
                hidden = silu(inputs @ w["gate.weight"][e]) * (inputs @ w["up.weight"][e])
                shared = shared + weight * (hidden @ w["down.weight"][e])
            np.testing.assert_allclose(y, shared, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_experts_of_gemma_4(build, run, normal):
    """The router and the experts have norms of their own, and each expert has a factor."""
    router = SoftmaxRouter.Config(norm=RMSNorm.Config(), logit_multiplier=0.5, expert_scale=True, load_balance=0.0)
    layer, x = build(norm=RMSNorm.Config(), router=router), normal(1, 5, 16)
    layer.router.weight[...], layer.router.expert_scale[...] = normal(16, 8), 1 + 0.3 * normal(8)
    layer.router.norm.weight[...], layer.norm.weight[...] = 1 + 0.3 * normal(16), 1 + 0.3 * normal(16, seed=1)
    w = {".".join(p): np.asarray(v[...], np.float64) for p, v in nnx.to_flat_state(nnx.state(layer))}
    for t, y in enumerate(np.asarray(run(layer, x)[0])[0]):
        token = np.asarray(x[0, t], np.float64)
        token = token / np.sqrt(np.mean(token**2) + 1e-6)
        logits, token = 0.5 * (token * w["router.norm.weight"]) @ w["router.weight"], token * w["norm.weight"]
        chosen = np.argsort(-logits)[:2]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum() * w["router.expert_scale"][chosen]
        hidden = [silu(token @ w["gate.weight"][e]) * (token @ w["up.weight"][e]) for e in chosen]
        expected = sum(weight * (h @ w["down.weight"][e]) for e, weight, h in zip(chosen, weights, hidden, strict=True))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_adapted_and_quantized_experts_with_a_form(build, run, normal):
    """Adapters with a bias equal a merged weight, and integers are close to floating point."""
    names, x = ("gate", "up", "down"), normal(2, 7, 16)
    adapted = build(**{**ROUTERS["gpt-oss"], **dict.fromkeys(names, LoraLinear.Config(base=BIASED, rank=2, alpha=4.0))})
    quantized = build(**{**ROUTERS["gpt-oss"], **dict.fromkeys(names, QuantizedLinear.Config(bias=True))})
    plain = build(**ROUTERS["gpt-oss"])
    randomize_biases(plain, normal)
    for name in names:
        source, target = getattr(plain, name), getattr(adapted, name)
        target.lora_b[...] = normal(*target.lora_b.shape) / 4
        target.weight[...], target.bias[...] = source.weight[...], source.bias[...]
        update = jnp.einsum("eir,ero->eio", target.lora_a[...], target.lora_b[...])
        source.weight[...] += 2.0 * update
        getattr(quantized, name).weight[...] = source.weight[...]
        getattr(quantized, name).bias[...] = source.bias[...]
    for layer in (adapted, quantized):
        nnx.update(layer.router, nnx.state(plain.router))
    expected = run(plain, x)[0]
    np.testing.assert_allclose(run(adapted, x)[0], expected, rtol=1e-4, atol=1e-5)
    difference = run(quantized, x)[0] - expected
    assert 0 < float(jnp.linalg.norm(difference)) < 0.03 * float(jnp.linalg.norm(expected))


@pytest.mark.slow
def test_a_mixture_inside_a_mixture_reports_both(build, run, normal):
    """Two mixtures in one layer. Each summary is reported for both together, and for each of them."""
    inner = MixtureOfExperts.Config(num_experts=4, hidden_dim=8, top_k=1)
    layer = build(shared=inner, top_k=1)
    layer.router.weight[...] = jnp.zeros((16, 8)).at[0].set(jnp.arange(8.0))
    outer = TransformerLayer.Config(attention=Attention.Config(num_heads=2)).build(
        input_dim=16, rngs=nnx.Rngs(0), precision=layer.precision
    )
    outer.feed_forward = layer
    x = normal(2, 6, 16)
    graph, state = nnx.split(outer)

    @jax.jit
    def report(state, x):
        block = nnx.merge(graph, state)
        with summaries.collect(block) as collector:  # as a stack does
            block(x, Context())
        return summaries.get_scalars(collector.summaries), collector.losses

    reported, losses = report(state, x)
    for name in ("expert_load_max", "expert_load_entropy"):
        parts = [float(reported[f"feed_forward.{part}{name}"]) for part in ("", "shared.")]
        assert float(reported[name]) == pytest.approx(np.mean(parts))
        assert parts[0] != parts[1]
    assert len(reported) == 6
    assert losses.keys() == {"load_balance", "router_z_loss"}


@pytest.mark.slow
def test_the_blocked_product_serves_as_well(build, naive, grads, close, normal):
    layer = build(dispatch=DroplessDispatch.Config(kernel="xla-blocked"))
    x, probe = normal(2, 37, 16), normal(2, 37, 16, seed=1)
    close(grads(layer, x, probe)[3], grads(layer, x, probe, naive)[3])


@pytest.mark.slow
def test_capacity_drops_what_has_no_room(build, naive, run, normal):
    """With a capacity of two of a row's eight tokens, first choices come first, then earlier positions."""
    layer = build(num_experts=2, top_k=2, dispatch=CapacityDispatch.Config(capacity_factor=0.25))
    layer.router.weight[...] = jnp.zeros_like(layer.router.weight[...]).at[0, 0].set(4.0)
    x = normal(1, 8, 16).at[0, :, 0].set(jnp.asarray([1.0, -1, -1, 1, 1, -1, 1, -1]))
    y, reported = run(layer, x)
    assert reported["dropped_assignments"] == 0.75
    # Expert 0 is the first choice of positions 0, 3, 4 and 6, expert 1 that of 1, 2, 5 and 7.
    np.testing.assert_allclose(y[0, 4:], 0, atol=1e-6)
    first = jax.nn.sigmoid(4.0)  # the weight of a first choice; the second choice of each is dropped
    for token, e in ((0, 0), (1, 1), (2, 1), (3, 0)):
        t = x[0, token]
        expected = first * ((jax.nn.silu(t @ layer.gate.weight[e]) * (t @ layer.up.weight[e])) @ layer.down.weight[e])
        np.testing.assert_allclose(y[0, token], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 6])
def test_rows_are_capacity_groups_of_their_own(length):
    cfg = CapacityDispatch.Config(capacity_factor=1.25).build()
    assert cfg.capacity(length, 2 * length, 8) == (1 if length == 1 else 2)
    assert cfg.capacity(4096, 8192, 8) == 1280
    assert CapacityDispatch.Config(capacity_factor=100.0).build().capacity(64, 128, 8) == 64


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _product(lhs, rhs, sizes, probe):
    valid = (jnp.arange(lhs.shape[0]) < jnp.sum(sizes))[:, None]

    def run(lhs, rhs):
        y = jnp.where(valid, XLA_BLOCKED(GroupedMatmulOp(jnp.where(valid, lhs, 0), rhs, sizes)), 0)
        return jnp.sum(y * probe), y

    return jax.grad(run, (0, 1), has_aux=True)(lhs, rhs)


@pytest.mark.parametrize("sizes", [[3, 0, 200, 1], [0, 0, 0, 0], [0, 0, 0, 300], [128, 128, 40, 4], [1, 1, 1, 1]])
def test_the_blocked_product_is_that_of_each_group(sizes, normal):
    lhs, rhs, probe = normal(300, 7), normal(4, 7, 5, seed=1), normal(300, 5, seed=2)
    (by_lhs, by_rhs), y = _product(lhs, rhs, jnp.asarray(sizes, jnp.int32), probe)
    lhs, rhs, probe, y, by_lhs, by_rhs = map(np.asarray, (lhs, rhs, probe, y, by_lhs, by_rhs))
    ends = np.cumsum(sizes)
    for e, end in enumerate(ends):
        rows = slice(end - sizes[e], end)
        # BLAS may raise floating-point exceptions for memory beside the operands, so the products do not use it.
        np.testing.assert_allclose(y[rows], np.einsum("rk,kn->rn", lhs[rows], rhs[e]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(by_lhs[rows], np.einsum("rn,kn->rk", probe[rows], rhs[e]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(by_rhs[e], np.einsum("rk,rn->kn", lhs[rows], probe[rows]), rtol=1e-4, atol=1e-4)


def test_the_selection_knows_the_op_and_takes_the_blocked_product_on_cpu(normal):
    with selection.use(selection.Selection(platform="cpu")) as choices:
        GroupedMatmulOp(normal(4, 3), normal(2, 3, 5), jnp.asarray([1, 3])).run()
    assert [(c.name, c.op.name) for c in choices.choices] == [("xla-blocked", "grouped_matmul")]
    with selection.use(selection.Selection(platform="tpu")) as choices:
        GroupedMatmulOp(normal(4, 3), normal(2, 3, 5), jnp.asarray([1, 3])).run()
    assert choices.choices[0].name == "xla"
    assert "not on tpu" in choices.choices[0].rejected["xla-blocked"]


@pytest.mark.slow
def test_every_axis_is_named_and_each_expert_is_initialised_alone(build):
    layer = build(width=64, num_experts=40, hidden_dim=Scaled(factor=2.0), router=SigmoidRouter.Config())
    axes = {".".join(map(str, k)): v.out_sharding for k, v in nnx.to_flat_state(nnx.state(layer))}
    assert axes == {
        "gate.weight": ("experts", "embed", "mlp"),
        "up.weight": ("experts", "embed", "mlp"),
        "down.weight": ("experts", "mlp", "embed"),
        "router.weight": ("embed", "experts"),
        "router.bias": ("experts",),
        "router.load": ("experts",),
    }
    gate, down = layer.gate.weight, layer.down.weight
    assert down.shape == (40, 128, 64)
    assert float(jnp.var(gate[...])) == pytest.approx(1 / 64, rel=0.05)
    assert float(jnp.var(down[...])) == pytest.approx(1 / 128, rel=0.05)
    assert not np.allclose(gate[0], gate[1])
    wide = Linear.Config(init=VarianceScaling(mode="fan_out"))
    result = build(width=64, num_experts=8, gate=wide, hidden_dim=16).gate.weight
    assert float(jnp.var(result[...])) == pytest.approx(1 / 16, rel=0.05)


def test_dtypes(build):
    layer = build(dtype="bfloat16", router=SigmoidRouter.Config())
    layer.eval()
    with jax.numpy_dtype_promotion("strict"):
        x = jax.ShapeDtypeStruct((1, 5, 16), jnp.bfloat16)
        assert jax.eval_shape(layer, x).dtype == jnp.bfloat16
        assert jax.eval_shape(layer.router, x).weight.dtype == jnp.float32
    assert build(params="bfloat16").up.weight.dtype == jnp.bfloat16


def _remat(layer, x):
    graph, state = nnx.split(layer)

    def call(state, x):
        with summaries.collect() as collector:
            return nnx.merge(graph, state)(x), collector.losses

    remat = Remat.Config(save=("mlp_gate", "mlp_up", "mlp_hidden", "router_logits")).build()
    y, losses = remat.wrap(call, in_loop=False)(state, x)
    remat.check()
    for name, value in losses.items():
        summaries.add_loss(name, value)
    return y


@pytest.mark.slow
def test_remat_knows_the_tags_and_changes_no_number(build, grads, close, normal):
    layer, x, probe = build(), normal(2, 37, 16), normal(2, 37, 16, seed=1)
    close(grads(layer, x, probe, _remat)[3], grads(layer, x, probe)[3], 1e-6)


@pytest.mark.slow
def test_summaries_say_how_the_experts_are_used(build, run):
    layer = build(num_experts=4, top_k=1)
    layer.router.weight[...] = jnp.zeros_like(layer.router.weight[...]).at[:, 2].set(5.0)
    _, reported = run(layer, jnp.ones((1, 4, 16)))
    assert reported["expert_load_max"] == 4.0
    assert float(reported["expert_load_entropy"]) == pytest.approx(0.0, abs=1e-6)
    layer.router.weight[...] = jnp.eye(16, 4) * 9
    _, reported = run(layer, jnp.eye(16)[None, :4])
    assert float(reported["expert_load_max"]) == pytest.approx(1.0)
    assert float(reported["expert_load_entropy"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"top_k": 9}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"activation": "sulu"}, "activation"),
        ({"form": ClampedForm(), "gate": None}, "form"),
        ({"shared_gate": Linear.Config()}, "shared_gate"),
    ],
)
def test_wrong_settings_are_named(settings, path):
    with pytest.raises(ConfigError) as error:
        check(MixtureOfExperts.Config(**settings))
    assert [p.path for p in error.value.problems] == [path]
