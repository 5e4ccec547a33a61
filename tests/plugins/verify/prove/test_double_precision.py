"""Repeating a check in float64, if rounding in float32 leaves a doubt."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_plugins_transformer import stack
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_verify import compat
from axlearn_plugins_verify.properties import derivatives
from axlearn_plugins_verify.prove import double_precision, forward, training_step
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from support import proof_cases

SMALL = ("model.decoder.hidden_dim=16", "input.sequence_length=8", "input.batch_size=4")
CERTAIN = Outcome(error=1e-7, tolerance=2e-5, compared="two numbers")
VAGUE = attrs.evolve(CERTAIN, tolerance=0.1)
FAILED = attrs.evolve(CERTAIN, error=0.5, difference=Difference(layer="", tensor="loss", error=0.5))


def case(*settings):
    return proof_cases.case("quickstart", (), (*SMALL, *settings))


def repeated(outcome, check):
    sample = case()
    return double_precision.repeat_if_doubtful(sample, outcome, sample.config, check)


def test_a_precise_check_is_not_repeated():
    assert repeated(CERTAIN, None) is CERTAIN


@pytest.mark.parametrize("outcome", [VAGUE, FAILED])
@pytest.mark.parametrize("precise", [CERTAIN, FAILED])
def test_float64_decides(outcome, precise):
    result = repeated(outcome, lambda config: precise)
    assert result.holds == precise.holds
    assert result.compared == "two numbers; repeated in float64"


def test_arrays_are_in_float64_only_while_a_check_is_repeated():
    dtypes = []

    def check(config):
        values = np.float32(1 / 3)
        dtypes.append([config.model.dtype, config.model.param_dtype, str(jnp.float32(values).dtype)])
        return CERTAIN

    repeated(VAGUE, check)
    assert dtypes == [["float64"] * 3]
    assert jnp.float32(1).dtype == np.float32
    assert not jax.config.jax_enable_x64


def test_the_result_in_float32_stays_if_float64_is_impossible():
    def check(config):
        if config.model.dtype == "float64":
            raise ValueError("no kernel for float64\nat all")
        return FAILED

    result = repeated(FAILED, check)
    assert not result.holds
    assert result.compared == "two numbers; not repeated in float64: no kernel for float64"


def test_other_kernels_do_not_clear_a_failure():
    failed = attrs.evolve(FAILED, compared="blocked of attention")
    refused = attrs.evolve(CERTAIN, compared="blocked of attention does not support it")
    result = repeated(failed, lambda config: refused if config.model.dtype == "float64" else failed)
    assert not result.holds
    assert result.compared.endswith("it selects other kernels")
    passed = attrs.evolve(CERTAIN, compared="grouped of matmul; blocked of attention, fused of norm")
    assert repeated(failed, lambda config: passed).holds


def test_a_failure_in_float64_does_not_count_if_a_layer_rounds_to_float32(monkeypatch):
    original = GatedFeedForward.__call__
    monkeypatch.setattr(
        GatedFeedForward, "__call__", lambda self, x: original(self, x).astype(np.float32).astype(x.dtype)
    )
    result = repeated(VAGUE, lambda config: FAILED)
    assert result.holds
    assert result.compared.endswith("not repeated in float64: a layer computes in float32")


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_comparison_that_float64_decides_stops_early(dtype, refuses):
    computed = []

    def check(config):
        name = config.model.dtype
        if refuses and name == "float64":
            raise ValueError("no kernel for float64")
        computed.append(f"{name}: first")
        double_precision.stop_if_vague(VAGUE.tolerance if name == "float32" else 1e-9, "two numbers")
        computed.append(f"{name}: second")
        return VAGUE if name == "float32" else CERTAIN

    sample = case(f"model.dtype={dtype}")
    result = forward.check_precisely(sample, check)
    assert result.holds
    both = [f"{name}: {part}" for name in ("bfloat16", "float32", "float64") for part in ("first", "second")]
    if dtype == "float32":  # it is the config's own dtype
        assert computed == (both[2:4] if refuses else both[2:])
    elif refuses:
        assert computed == [*both[:2], "float32: first", *both[2:4]]
    else:
        assert computed == [*both[:2], "float32: first", *both[4:]]
    expected = "not repeated in float64: no kernel for float64" if refuses else "; repeated in float64"
    assert result.compared.endswith(expected)
    assert not np.isnan(result.error)


def scale_scanned_layers(monkeypatch, factor):
    original = stack._layer

    def layer(graphs, context, remat, shared, kind, in_loop=False):
        run = original(graphs, context, remat, shared, kind, in_loop)
        return (lambda carry, *args: run((factor * carry[0], carry[1]), *args)) if in_loop else run

    monkeypatch.setattr(stack, "_layer", layer)


@pytest.mark.slow
def test_a_fault_that_float32_hides_is_found(monkeypatch):
    scale_scanned_layers(monkeypatch, 1 + 1e-5)
    sample, checked = case("model.decoder.layer.attention.scale=10000.0"), proof_cases.load_property("scan")
    rounded = checked._check(sample, sample.config)
    assert rounded.holds
    assert rounded.tolerance > double_precision.VAGUE
    outcome = checked.check(sample)
    assert not outcome.holds
    assert outcome.compared.endswith("repeated in float64")
    assert outcome.difference.layer == "decoder"


@pytest.mark.slow
def test_a_false_alarm_by_rounding_is_cleared(monkeypatch):
    monkeypatch.setitem(training_step.FLOOR, "float32", 1e-12)
    monkeypatch.setitem(training_step.EPSILON, "float32", 0.0)
    sample, checked = case(), proof_cases.load_property("microbatches")
    assert not checked._check(sample, sample.config).holds
    outcome = checked.check(sample)
    assert outcome.holds
    assert outcome.error < 1e-12
    assert outcome.compared.endswith("repeated in float64")


@pytest.mark.slow
def test_derivatives_that_float32_hides_are_compared_in_float64(monkeypatch):
    monkeypatch.setattr(derivatives, "ROUNDING", 1e6)
    sample, checked = case(), proof_cases.load_property("derivatives")
    _, skipped = checked._check(sample, sample.config)
    assert skipped > 0.5
    outcome = checked.check(sample)
    assert outcome.holds
    assert outcome.error < 0.02
    with compat.double_precision():
        assert checked._check(sample, double_precision.double_config(sample.config))[1] < 0.1
    assert outcome.compared.endswith("with differences of the loss; repeated in float64")
