import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.kernels.mask_arrays import select_keys, separate_queries
from axlearn_plugins_transformer.kernels.masks import Causal, Mask, Prefix, Segments, SelectedKeys

LENGTH = 12
RNG = np.random.default_rng(0)
IDS = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0], [1] * 12], jnp.int32)
PREFIX = jnp.asarray([3, 0], jnp.int32)
SELECTED = jnp.asarray(RNG.integers(-3, LENGTH, (2, LENGTH, 4)), jnp.int32)


@pytest.mark.slow
def test_arrays_are_separated_by_query():
    """Rows of one query each, as in a serving step."""
    mask = ((Causal() & SelectedKeys(SELECTED)) | Prefix(PREFIX)) & Segments(IDS, IDS)
    separate = separate_queries(mask, 2, LENGTH)
    slots = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), 2)[:, None]
    actual = separate.materialize((0, 1), (0, LENGTH), slots)
    expected = mask.materialize((0, LENGTH), (0, LENGTH))
    np.testing.assert_array_equal(actual.reshape(expected.shape), expected)
    some = jnp.asarray([7, 2, 9], jnp.int32)[None]
    part = select_keys(mask, some).materialize((0, LENGTH), (0, 3), None, some)
    np.testing.assert_array_equal(part, expected[:, :, some[0]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stripes(Mask):
    """A mask of another package, which does not say what its array belongs to."""

    width: jax.Array


def test_an_array_of_unknown_role_is_refused():
    mask = Causal() & Stripes(jnp.ones((2,), jnp.int32))
    with pytest.raises(RequestError, match=r"unknown which arrays of the mask 'stripes'.*\n.*\n.*fix: define `roles`"):
        separate_queries(mask, 2, 3)
