"""Factors of muP by logical axes and shapes: initial values, learning rates, logits and attention scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axlearn_core.config import configure
from axlearn_core.errors import ConfigError
from axlearn_core.learn import AdamW, Learner, ParameterRule
from axlearn_core.nn.initializers import Normal, VarianceScaling
from axlearn_plugins_transformer.attention import score_scale
from axlearn_plugins_transformer.width_scaling import HeadScale, WidthInitializer, WidthMultiplier, WidthRule

WIDTH = 256


def test_multipliers_are_powers_of_the_width():
    assert WidthMultiplier(base_width=64).build(width=64) == 1.0
    assert WidthMultiplier(base_width=64, value=3.0).build(width=WIDTH) == 0.75
    assert WidthMultiplier(base_width=64, exponent=-0.5).build(width=WIDTH) == 0.5


@pytest.mark.parametrize(
    ("scale", "size", "grows", "expected"),
    [
        (None, 64, True, 64**-0.5),
        (HeadScale(base_width=256), 64, True, 64**-0.5),  # the base width
        (HeadScale(base_width=64), 64, True, 16**0.5 / 64),  # as many heads, four times as large
        (HeadScale(base_width=64), 64, False, 64**-0.5),  # head_dim is set
        (HeadScale(base_width=64, base_head_dim=32), 64, True, 32**0.5 / 64),
        (HeadScale(base_width=64, base_head_dim=64), 64, True, 64**-0.5),  # more heads
        (HeadScale(base_width=64, value=0.1), 64, True, 0.025),
    ],
    ids=str,
)
def test_attention_scores_shrink_with_the_head(scale, size, grows, expected):
    assert score_scale(scale, size, WIDTH, grows=grows) == pytest.approx(expected, rel=1e-12)


SHAPES = {
    ("vocab", "embed"): (32, WIDTH),
    ("embed", "vocab"): (WIDTH, 32),
    ("embed", "mlp"): (WIDTH, 64),
    ("heads", "head_dim", "embed"): (4, 16, WIDTH),
    ("embed", "experts"): (WIDTH, 8),
    ("embed", "heads"): (WIDTH, 8),
    ("rank", "embed"): (16, WIDTH),
    ("embed",): (WIDTH,),
    ("taps", "heads", "head_dim"): (4, 8, 16),
}
ROUTER = [("embed", "experts"), ("embed", "heads")]
HIDDEN = [("embed", "mlp"), ("heads", "head_dim", "embed")]


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_initial_values_scale_by_the_kind_of_parameter(axes):
    """A fixed standard deviation shrinks by the exponent of the kind; a fan-in already includes that of hidden matrices."""
    shape, ratio = SHAPES[axes], 4.0
    sides = {"in_axis": (0, 1) if axes[0] == "heads" else (0,), "out_axis": (-1,)}
    exponent = -0.5 if axes in HIDDEN else -1.0 if axes in ROUTER else 0.0

    def draw(init):
        return np.asarray(init.build(axes=axes)(jax.random.key(0), shape, jnp.float32, **sides))

    def scaled(base, base_width=64):
        return draw(WidthInitializer(base=base, base_width=base_width)) / draw(base)

    np.testing.assert_array_equal(scaled(Normal(), base_width=WIDTH), 1.0)
    np.testing.assert_allclose(scaled(Normal()), ratio**exponent, rtol=1e-5)
    fan_in = -0.5 if axes[0] in ("embed", "heads") and len(axes) > 1 else 0.0
    if len(axes) > 1:
        np.testing.assert_allclose(scaled(VarianceScaling()), ratio ** (exponent - fan_in), rtol=1e-5)


def test_without_axes_the_base_initializer_is_used():
    arguments = (jax.random.key(0), (WIDTH, 8), jnp.float32)
    init, base = WidthInitializer(base=Normal(), base_width=64).build(), Normal().build()
    one, other = (f(*arguments, in_axis=(0,), out_axis=(1,)) for f in (init, base))
    np.testing.assert_array_equal(one, other)


def rates(optimizer, names, **options):
    """Return the factors for parameters with these axes and shapes, next to an embedding."""
    shapes = {"table": (32, WIDTH), **{str(i): shape for i, (_, shape) in enumerate(names)}}
    axes = {"table": ("vocab", "embed"), **{str(i): axis for i, (axis, _) in enumerate(names)}}
    params = {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in shapes.items()}
    optimizers: dict[str, Any] = dict.fromkeys(params, optimizer)
    return WidthRule(base_width=64, **options).scale_updates(params, axes, optimizers)


MATRICES = [
    (("layers", "embed", "mlp"), (2, WIDTH, 64)),
    (("heads", "head_dim", "embed"), (4, 16, WIDTH)),
    (("experts", "mlp", "embed"), (2, 64, WIDTH)),
    (("layers", "embed", "experts"), (2, WIDTH, 8)),
    (("embed", "rank"), (WIDTH, 16)),
    (("rank", "heads", "head_dim"), (16, 4, 16)),  # an adapter
    (("heads", "head_dim"), (4, 16)),  # a bias
    (("layers", "norm"), (2, WIDTH)),
    (("embed", "vocab"), (WIDTH, 32)),
    (("taps", "heads", "head_dim"), (4, 4, 16)),
]


@pytest.mark.parametrize("optimizer", [AdamW(), configure(optax.lion, learning_rate=0.01)])
def test_matrices_with_a_growing_fan_in_learn_at_a_lower_rate(optimizer):
    factors = rates(optimizer, MATRICES)
    assert factors["table"] == pytest.approx(1)
    expected = [0.25, 0.25, 0.25, 0.25, 0.25, 1, 1, 1, 1, 1]
    assert [factors[str(i)] for i in range(len(MATRICES))] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("latents", "expected"), [("grow", 0.25), ("fixed", 1.0)])
def test_the_ranks_of_latent_attention_grow_or_are_fixed(latents, expected):
    latent = [(("embed", "heads", "head_dim"), (96, 4, 16))]  # the rank, 96, is the input
    factors = rates(AdamW(), latent, latents=latents)
    assert factors["0"] == pytest.approx(expected, rel=1e-3)


def test_other_rules_multiply_their_scales():
    shapes, axes = {"a": (8, 8), "b": (8, 8)}, {"a": ("vocab", "embed"), "b": ("embed", "mlp")}
    params = {p: jnp.ones(s) for p, s in shapes.items()}

    def change(*rules):
        optimizer = AdamW(learning_rate=0.1, weight_decay=0.0)
        learner = Learner.Config(optimizer=optimizer, rules=rules).build(max_steps=3, axes=axes)
        new, *_ = learner.update(params, learner.init(params), params, jnp.float32(0))
        return float(new["b"][0, 0] - 1)

    other = ParameterRule(pattern="b", learning_rate_scale=0.5)
    assert change(WidthRule(base_width=2), other) == pytest.approx(change() / 8, rel=1e-3)


def plan(params, axes, optimizer=None, base_width=64):
    optimizer = optimizer or AdamW(learning_rate=0.1)
    cfg = Learner.Config(optimizer=optimizer, rules=(WidthRule(base_width=base_width),))
    return cfg.build(max_steps=3, axes=axes).init({p: jnp.ones(s) for p, s in params.items()})


@pytest.mark.parametrize(
    ("params", "axes", "message"),
    [
        ({"a": (8, 8)}, {"a": ("embed", "mlp")}, r"cannot tell the width.*\n.*no parameter with these axes"),
        (
            {"a": (8, 16), "b": (8, 32)},
            {"a": ("vocab", "embed"), "b": ("vocab", "embed")},
            r"cannot tell the width.*\n.*a has width 16, b has width 32",
        ),
        (
            {"a": (8, 16), "b": (8, 32)},
            {"a": ("vocab", "embed"), "b": (None, None)},
            r"model \(b\).*no logical axis names",
        ),
    ],
)
def test_models_without_the_axes_are_refused(params, axes, message):
    with pytest.raises(ConfigError, match=message):
        plan(params, axes)


def test_optimizers_without_a_rule_are_refused():
    params, axes = {"a": (8, 16), "b": (16, 8)}, {"a": ("vocab", "embed"), "b": ("embed", "mlp")}
    optimizer = configure(optax.sgd, learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"learner\.optimizer: mup does not define.*\n.*sgd"):
        plan(params, axes, optimizer)
    assert plan(params, axes, optimizer, base_width=16)  # nothing to scale
