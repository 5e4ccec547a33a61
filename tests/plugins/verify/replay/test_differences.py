"""Scalars and states are compared bit by bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_plugins_verify.replay.differences import compare_scalars, compare_states


def test_same_scalars_include_nan():
    values = {"loss": float("nan"), "grad_norm": float("inf"), "weight": 3.0}
    assert compare_scalars(2, values | {"eval_loss": 1.0}, values | {"extra": 1.0}) == []


@pytest.mark.parametrize("other", [float("nan"), float("-inf"), float(np.nextafter(np.float32(1.5), np.float32(2)))])
def test_scalar_that_differs_is_named(other):
    (difference,) = compare_scalars(7, {"loss": 1.5, "weight": 2.0}, {"loss": other, "weight": 2.0})
    assert (difference.step, difference.name, difference.recorded) == (7, "loss", 1.5)
    assert "loss of step 7: 1.5 recorded" in str(difference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8"])
@pytest.mark.parametrize("bit", [0, 6])
def test_flipped_bit_is_named(dtype, bit):
    array = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
    flipped = array.copy()
    bits = flipped.view(f"uint{8 * flipped.dtype.itemsize}")
    bits[1, 2] ^= 1 << bit
    state = {"a": jnp.ones(2), "b": {"c": jnp.asarray(array)}}
    (difference,) = compare_states(state, {**state, "b": {"c": jnp.asarray(flipped)}})
    assert (difference.path, difference.index, difference.bit, difference.count, difference.bits) == (
        "b.c",
        (1, 2),
        bit,
        1,
        1,
    )
    assert f"b.c[1, 2]: bit {bit} is flipped" in str(difference)


def test_sign_of_zero_and_nan_payload_count():
    one = {"x": jnp.array([0.0, jnp.nan], jnp.float32)}
    assert compare_states(one, {"x": jnp.array([0.0, jnp.nan], jnp.float32)}) == []
    (difference,) = compare_states(one, {"x": jnp.array([-0.0, jnp.nan], jnp.float32)})
    assert difference.bit == 31


def test_many_values_are_counted_and_measured():
    one, other = {"x": jnp.ones((4, 5))}, {"x": jnp.ones((4, 5)).at[1:, 2].set(1.5)}
    (difference,) = compare_states(one, other)
    assert (difference.count, difference.index, difference.bit) == (3, (1, 2), None)
    assert difference.error == pytest.approx((3 * 0.25) ** 0.5 / 20**0.5)
    assert "x: 3 of 20 values differ" in str(difference)
