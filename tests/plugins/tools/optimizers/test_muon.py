import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

from axlearn_core.config import configure
from axlearn_core.errors import RequestError
from axlearn_core.learn import AdamW, Learner, ParameterRule, without_state
from axlearn_core.learn.optimizers import Growth
from axlearn_plugins_tools.optimizers.muon import Muon, matrix_axes


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "mlp"), ((0,), (1,))),
        (("mlp", "embed"), ((0,), (1,))),
        (("layers", "embed", "mlp"), ((1,), (2,))),
        (("layers", "experts", "mlp", "embed"), ((2,), (3,))),
        (("layers", "embed", "heads", "head_dim"), ((1,), (2, 3))),
        (("layers", "heads", "head_dim", "embed"), ((1, 2), (3,))),
        (("embed", "embed"), ((0,), (1,))),
        (("layers", "heads", "head_dim", "rank"), ((1, 2), (3,))),
        (("rank", "heads", "head_dim"), ((0,), (1, 2))),
        (("vocab", "embed"), None),
        (("embed", "vocab"), None),
        (("layers", "norm"), None),
        (("norm",), None),
        ((), None),
        ((None,), None),
        (("layers",), None),
        (("layers", None), None),
        (("layers", "experts", None), None),
    ],
)
def test_logical_axes_say_which_dimensions_form_a_matrix(axes, expected):
    assert matrix_axes("w", axes) == (expected and MuonDimensionNumbers(*expected))


@pytest.mark.parametrize(
    "axes", [None, (None, None), ("layers", None, None), ("layers", "experts", None, None)], ids=str
)
def test_a_matrix_without_axis_names_is_refused_rather_than_guessed(axes):
    learner = Learner.Config(optimizer=Muon()).build(max_steps=3, axes=axes and {"w": axes})
    with pytest.raises(RequestError, match=r"'w'.*no logical axis names"):
        learner.init({"w": jnp.ones((3, 4, 5, 6)[: len(axes or (0, 0))])})


@pytest.mark.parametrize(
    ("axes", "sizes", "expected"),
    [
        (("embed", "mlp"), (64, 256, 16, 64), 0.5),  # the spectral norm of an update is sqrt(max(in, out))
        (("layers", "mlp", "embed"), (256, 64, 64, 16), 0.5),
        (("embed", "rank"), (64, 8, 16, 8), 0.25),
        (("rank", "heads", "head_dim"), (8, 64, 8, 16), 1.0),
        (("embed", "experts"), (64, 8, 16, 8), 0.25),  # a router, which AdamW trains
        (("embed", "mlp"), (16, 64, 16, 64), 1.0),
    ],
)
def test_updates_scale_with_the_width_by_their_spectral_norm(axes, sizes, expected):
    names = ("fan_in", "fan_out", "base_fan_in", "base_fan_out")
    growth = Growth(**dict(zip(names, sizes, strict=True)))
    assert Muon().width_scale(axes, growth) == pytest.approx(expected)


def test_vectors_and_scalars_without_axis_names_are_trained_by_adamw():
    params = {"scale": jnp.ones((4,)), "temperature": jnp.ones(())}
    grads = {"scale": normal(0, (4,)), "temperature": jnp.float32(-1)}

    def updated(optimizer):
        learner = Learner.Config(optimizer=optimizer, max_grad_norm=None).build(max_steps=3)
        return learner.update(grads, learner.init(params), params, jnp.float32(0))[0]

    new, expected = (updated(cls(learning_rate=0.1, weight_decay=0.1)) for cls in (Muon, AdamW))
    for path, value in expected.items():
        np.testing.assert_allclose(new[path], value, rtol=1e-6)
        assert (value != params[path]).any()


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def orthogonal(matrix, tolerance):
    """Newton-Schulz brings singular values near 1, not to it."""
    values = np.linalg.svd(matrix, compute_uv=False)
    assert abs(values - 1).max() < tolerance, values


def test_muon_orthogonalizes_stacked_matrices_and_leaves_others_to_adamw():
    axes = {"q": ("layers", "embed", "heads", "head_dim"), "norm": ("layers", "norm"), "e": ("vocab", "embed")}
    shapes = {"q": (3, 16, 2, 4), "norm": (3, 16), "e": (11, 16)}
    params = {p: normal(0, s) for p, s in shapes.items()}
    grads = {p: normal(1, s) for p, s in shapes.items()}
    optimizer = Muon(learning_rate=1.0, rms=0.2, weight_decay=0.0)
    instance = Learner.Config(optimizer=optimizer, max_grad_norm=None).build(max_steps=3, axes=axes)
    with jax.numpy_dtype_promotion("strict"):
        new, _, _ = jax.jit(instance.update)(grads, instance.init(params), params, jnp.float32(0))
    for layer in range(3):
        update = (params["q"][layer] - new["q"][layer]).reshape(16, 8)
        orthogonal(update / (0.2 * 16**0.5), 0.35)
    plain = Learner.Config(optimizer=AdamW(learning_rate=1.0, weight_decay=0.0), max_grad_norm=None).build(max_steps=3)
    rest = {p: params[p] for p in ("norm", "e")}
    expected, _, _ = jax.jit(plain.update)({p: grads[p] for p in rest}, plain.init(rest), rest, jnp.float32(0))
    for path in rest:
        np.testing.assert_allclose(new[path], expected[path], rtol=1e-6)


@pytest.mark.fast_cases("0.1")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_embeddings_have_a_multiple_of_the_rate(weight_decay):
    axes = {"q": ("embed", "mlp"), "head": ("embed", "vocab"), "e": ("vocab", "embed")}
    shapes = {"q": (16, 8), "head": (16, 11), "e": (11, 16)}
    params, grads = ({p: normal(seed, s) for p, s in shapes.items()} for seed in (0, 1))

    def update(embedding_rate):
        optimizer = Muon(learning_rate=0.1, weight_decay=weight_decay, embedding_rate=embedding_rate)
        learner = Learner.Config(optimizer=optimizer, max_grad_norm=None).build(max_steps=3, axes=axes)
        new, _, _ = jax.jit(learner.update)(grads, learner.init(params), params, jnp.float32(0))
        return {p: new[p] - params[p] for p in params}

    plain, scaled = update(1.0), update(5.0)
    np.testing.assert_allclose(scaled["e"], 5 * plain["e"], rtol=1e-4)
    for path in ("q", "head"):
        np.testing.assert_allclose(scaled[path], plain[path], rtol=1e-5)


def test_muon_on_plain_matrices_is_optax_s():
    params = {"w": normal(0, (6, 10))}
    instance = Learner.Config(optimizer=Muon(learning_rate=0.1), max_grad_norm=None).build(
        max_steps=9, axes={"w": ("embed", "mlp")}
    )
    reference = muon(0.1, weight_decay=0.1, consistent_rms=0.2)
    state, other, theirs = instance.init(params), reference.init(params), params
    ours, update = jax.jit(instance.update), jax.jit(reference.update)
    for i in range(3):
        grads = {"w": normal(i + 1, (6, 10))}
        params, state, _ = ours(grads, state, params, jnp.float32(0))
        updates, other = update(grads, other, theirs)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(params["w"], theirs["w"], rtol=2e-5, atol=1e-6)


def test_muon_takes_the_decay_mask_for_both_of_its_parts():
    axes = {"w": ("embed", "mlp"), "scale": ("norm",)}
    params = {"w": jnp.eye(4), "scale": jnp.ones((4,))}
    rules = (ParameterRule(pattern="*", weight_decay=False),)
    zero = jax.tree.map(jnp.zeros_like, params)
    for param_rules, moves in ((rules, False), ((), True)):
        instance = Learner.Config(optimizer=Muon(learning_rate=0.1), rules=param_rules).build(max_steps=3, axes=axes)
        new, _, _ = jax.jit(instance.update)(zero, instance.init(params), params, jnp.float32(0))
        assert {p: bool((new[p] != params[p]).any()) for p in params} == {"w": moves, "scale": moves}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_both_lower_a_loss(name):
    optimizer = {"adamw": AdamW, "muon": Muon}[name](learning_rate=0.2)
    target = normal(1, (8, 8))
    params = {"w": jnp.zeros((8, 8))}
    instance = Learner.Config(optimizer=optimizer).build(max_steps=60, axes={"w": ("embed", "mlp")})
    state = instance.init(params)

    @jax.jit
    def step(state, params):
        loss_of = without_state(lambda p, _: (jnp.mean((p["w"] - target) ** 2), {}))
        (loss, *_), grads = instance.value_and_grad(loss_of, params, {}, {})
        return loss, instance.update(grads, state, params, loss)

    losses = []
    for _ in range(60):
        loss, (params, state, _) = step(state, params)
        losses.append(float(loss))
    assert losses[-1] < 0.25 * losses[0]


def test_muon_leaves_alone_what_a_rule_gives_another_optimizer():
    axes = {"w": ("embed", "mlp"), "bias": ("experts",)}
    params = {"w": normal(0, (4, 6)), "bias": jnp.zeros((3,))}
    grads = {"w": normal(1, (4, 6)), "bias": jnp.asarray([1.0, -2.0, 0.0])}
    rule = ParameterRule(pattern="bias", optimizer=configure(optax.sgd, learning_rate=0.5))
    both = Learner.Config(optimizer=Muon(learning_rate=0.1), rules=(rule,)).build(max_steps=3, axes=axes)
    alone = Learner.Config(optimizer=Muon(learning_rate=0.1)).build(max_steps=3, axes={"w": axes["w"]})
    rest = {"w": params["w"]}
    new, state, _ = jax.jit(both.update)(grads, both.init(params), params, jnp.float32(0))
    expected, _, _ = jax.jit(alone.update)({"w": grads["w"]}, alone.init(rest), rest, jnp.float32(0))
    np.testing.assert_allclose(new["w"], expected["w"], rtol=1e-6)
    assert np.sign(new["bias"]).tolist() == [-1.0, 1.0, 0.0]
    jax.jit(both.update)(grads, state, new, jnp.float32(0))
