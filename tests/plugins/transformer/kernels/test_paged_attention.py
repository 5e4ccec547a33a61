import jax
import jax.numpy as jnp
import pytest

from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 9), (6, 0), (6, 3), (6, 10)])
def test_flops_for_a_request_count_the_keys_that_it_reads(new, cached, window):
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 8), (2,), (3,), (1,))]
    query, pages = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 6, 16), (8, 4, 4, 16)))
    op = PagedAttentionOp(query, pages, *ints, scale=1.0, window=window)
    keys = sum(min(cached + i, window or 10**6) for i in range(1, new + 1))
    assert op.request_flops(new, cached) == 2 * 2 * 6 * 16 * keys
