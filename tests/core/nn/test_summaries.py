"""Summaries say what they are over; statistics over positions count tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.learn import value_and_grad
from axlearn_core.nn import padding, summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.summaries import Summary, maximum, mean_over_rows, mean_over_tokens, total

VALUES = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
REAL = np.arange(6)[None] < np.asarray([6, 2, 3, 0])[:, None]
KINDS = {
    "mean over tokens": (mean_over_tokens, lambda x, real: x[real].mean(), 11),
    "mean over rows": (mean_over_rows, lambda x, real: np.mean([a[r].mean() for a, r in zip(x, real, strict=True) if r.any()]), 3),
    "max over tokens": (maximum, lambda x, real: x[real].max(), 11),
    "sum over tokens": (total, lambda x, real: x[real].sum(), 11),
}  # fmt: skip


def taken(of, values, real=None):
    context = None if real is None else Context(segment_ids=jnp.asarray(2 * real, jnp.int32))
    with padding.use_context(context):
        return of(jnp.asarray(values))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_count_whatever_is_in_it(kind):
    of, expected, weight = KINDS[kind]
    summary = taken(of, np.where(REAL, VALUES, 1e9), REAL)
    assert str(summary) == kind
    np.testing.assert_allclose(summary.value, expected(VALUES, REAL), rtol=1e-6)
    assert float(summary.weight) == weight
    empty = taken(of, np.full_like(VALUES, 7), np.zeros_like(REAL))
    assert (float(empty), float(empty.weight)) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_padding_no_bit_changes(kind):
    of, expected, _ = KINDS[kind]
    everything = np.ones_like(REAL)
    plain, masked = (jax.jit(lambda x, real=real: taken(of, x, real))(VALUES) for real in (None, everything))
    np.testing.assert_array_equal(plain.value, masked.value)
    np.testing.assert_array_equal(plain.weight, masked.weight)
    np.testing.assert_allclose(plain.value, expected(VALUES, everything), rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (8, 128), (5, 33)])
def test_a_mean_over_a_mask_of_ones_has_the_bits_of_a_mean(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    masked = lambda x: padding.masked_mean(x**2, jnp.ones(shape, bool) & (x < 1e9))  # noqa: E731
    (one, slope), (two, other) = (jax.jit(jax.value_and_grad(f))(x) for f in (lambda x: jnp.mean(x**2), masked))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(slope, other)


@pytest.mark.slow_cases("mean over tokens")
@pytest.mark.parametrize("kind", KINDS)
def test_parts_combine_to_the_whole(kind):
    of, expected, _ = KINDS[kind]
    parts = [taken(of, VALUES[i : i + 1], REAL[i : i + 1]) for i in range(4)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merged(part)
    zeros = jax.tree.map(jnp.zeros_like, merged)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts).reduced()
    for whole in (merged, stacked, zeros.merged(merged), merged.merged(zeros)):
        np.testing.assert_allclose(whole.value, expected(VALUES, REAL), rtol=1e-6)
        assert float(whole.weight) == float(taken(of, VALUES, REAL).weight)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_microbatches_give_the_summaries_of_the_batch(parts):
    def loss(params, variables, batch, key):
        with padding.use_context(Context(real=batch["real"])):
            report = {kind: of(batch["x"] * params) for kind, (of, *_) in KINDS.items()}
        weight = jnp.sum(batch["real"], dtype=jnp.float32)
        return jnp.mean(batch["x"] * params), ({**report, "weight": weight}, variables)

    batch = {"x": jnp.asarray(VALUES), "real": jnp.asarray(REAL)}
    (_, report, _), _ = jax.jit(lambda p, b: value_and_grad(loss, p, {}, b, None, parts))(jnp.float32(1), batch)
    for kind, (_, expected, weight) in KINDS.items():
        np.testing.assert_allclose(report[kind].value, expected(VALUES, REAL), rtol=1e-6, err_msg=kind)
        assert float(report[kind].weight) == weight
    assert float(report["weight"]) == 11


def test_layers_combine_by_kind():
    layers = [
        {"mean": Summary(jnp.float32(v), jnp.float32(w)), "max": Summary(jnp.float32(v), jnp.float32(w), "max")}
        for v, w in ((1.0, 3.0), (5.0, 1.0))
    ]
    with summaries.collect() as collector:
        summaries.add_layers([({}, layer) for layer in layers])
    assert {k: float(v) for k, v in collector.summaries.items()} == {"mean": 2.0, "max": 5.0}


def test_held_out_data_has_no_auxiliary_losses():
    def stack():
        with summaries.collect() as layer:  # as a stack of layers does
            summaries.add_loss("penalty", jnp.float32(2.0))
            summaries.add_loss("penalty", jnp.float32(1.0))
        summaries.add_layers([(layer.losses, layer.summaries)] * 2)

    with summaries.held_out(), summaries.collect() as measured:
        stack()
    with summaries.collect() as trained:
        stack()
    assert (trained.losses, trained.summaries) == ({"penalty": 6.0}, {})
    assert (measured.losses, measured.summaries) == ({}, {"penalty": 6.0})
    assert not summaries.is_held_out()


def test_two_layers_cannot_add_one_name():
    with summaries.collect():
        summaries.add_summary("a", maximum(jnp.ones((1, 2))))
        with pytest.raises(RequestError, match="two layers add the summary 'a'"):
            summaries.add_summary("a", jnp.float32(1))


class Reporter(nnx.Module):
    def __call__(self, value, name="load", of=mean_over_tokens):
        with summaries.module_scope(self):
            summaries.add_summary(name, of(value))


class Twice(nnx.Module):
    """Two modules that report the same names, one of them in a list."""

    def __init__(self):
        self.first, self.others = Reporter(), nnx.List([Reporter()])

    def __call__(self, low, high):
        self.first(low)
        self.first(low, "lowest")
        self.others[0](high)
        self.first(jnp.sum(low), "plain", lambda x: x)
        self.others[0](jnp.sum(high), "plain", lambda x: x)


def test_modules_of_a_layer_may_add_one_name():
    """The name combines their values, and each value is below the path of its module."""
    layer = Twice()
    with summaries.collect() as stack:
        reports = []
        for factor in (1.0, 3.0):  # as a stack of two layers does
            with summaries.collect(layer) as collector:
                layer(jnp.full((1, 6), factor), jnp.full((2, 6), 4 * factor))
            reports.append((collector.losses, collector.summaries))
        summaries.add_layers(reports)
    assert (
        {name: float(value) for name, value in stack.summaries.items()}
        == {
            "load": 6.0,  # (1 + 4 + 4) / 3 in the first layer, because the second module has twice the tokens, and 9 in the second
            "first.load": 2.0,
            "others.0.load": 8.0,
            "lowest": 2.0,
            "plain": 54.0,  # of 6 and 48, and of 18 and 144
            "first.plain": 12.0,
            "others.0.plain": 96.0,
        }
    )
    assert isinstance(stack.summaries["load"], Summary)
    assert float(stack.summaries["load"].weight) == 36


def test_modules_that_cannot_share_a_name():
    layer, x = Twice(), jnp.ones((1, 2))
    with summaries.collect(layer):
        layer.first(x)
        with pytest.raises(RequestError, match="'load' has different kinds in two layers") as error:
            layer.others[0](x, of=maximum)
    assert "got: max over tokens and mean over tokens" in str(error.value)
    for root, second in ((layer, layer.first), (None, layer.others[0]), (layer, Reporter())):
        with summaries.collect(root):
            layer.first(x)
            with pytest.raises(RequestError, match="two layers add the summary 'load'") as error:
                second(x)
        assert "with module_scope(self)" in str(error.value)


def test_rows_with_weights_alone_end_at_their_last_target():
    weights = jnp.asarray([[0, 0, 1, 1, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], jnp.float32)
    expected = [[True] * 4 + [False], [True] * 5, [False] * 5]
    np.testing.assert_array_equal(padding.make_token_mask(weights), expected)


def test_positions_of_a_layer_s_own_all_count():
    with padding.use_context(Context(real=jnp.asarray(REAL))):
        assert padding.tokens(4, 3) is None
        assert padding.tokens(2, 6) is None
