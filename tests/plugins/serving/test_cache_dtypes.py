"""Caches in int8 and float8: contents, accuracy and unsupported models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.config import find
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split
from axlearn_plugins_transformer.kernels.paged_split import XLA_SPLIT
from axlearn_plugins_transformer.paged_cache import PagedCache, quantize_vectors
from support import serving_models

DTYPES = ("int8", "float8_e4m3fn")
ERROR = {"int8": 0.05, "float8_e4m3fn": 0.3}
"""Maximum difference of a log-probability of the small model."""
SIZES = {
    "runner.block_size": 4, "runner.max_context": 48, "runner.max_rows": 4, "runner.max_step_tokens": 24,
    "runner.chunk": 8, "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_come_back_within_a_step(dtype):
    x = np.random.default_rng(0).standard_normal((5, 3, 16)).astype(np.float32) * np.array(
        [[1e-3], [1.0], [1e4]], np.float32
    )
    x[0] = 0
    narrow, scale = quantize_vectors(jnp.asarray(x), dtype)
    assert str(narrow.dtype) == dtype
    assert scale.shape == (5, 3)
    back = np.asarray(narrow.astype(jnp.float32)) * np.asarray(scale)[..., None]
    largest = np.abs(x).max(-1, keepdims=True)
    assert np.all(np.abs(back - x) <= largest * (0.5 / 127 if dtype == "int8" else 1 / 16) * 1.001)
    assert np.all(back[0] == 0)


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("heads_first", [True, False])
def test_the_kernel_reads_scaled_pages_as_the_reference_does(heads_first):
    rng = np.random.default_rng(1)
    new = rng.standard_normal((6, 8, 2, 2, 16)).astype(np.float32)  # [P, S, G, 2, H]
    narrow, scales = map(np.asarray, jax.jit(lambda x: quantize_vectors(x, "int8"))(new))
    if heads_first:
        pages, scales = np.transpose(narrow, (0, 3, 2, 1, 4)), np.transpose(scales, (0, 3, 2, 1))
    else:
        pages, scales = narrow.reshape(6, 8, 4, 16), scales.reshape(6, 8, 4)
    arrays = (
        rng.standard_normal((6, 4, 16)).astype(np.float32), pages,
        *(np.asarray(x, np.int32) for x in ([[0, 3, 5], [2, 1, 4], [5, 0, 0]], [19, 9, 4], [0, 1, 2, 6], [3])),
    )  # fmt: skip

    @jax.jit
    def both(arrays, scales):
        options = {"scale": 0.25, "heads_first": heads_first, "finite": True, "split": Split(2, 4)}
        op = PagedAttentionOp(*arrays, scales=scales, **options)
        return XLA_SPLIT(op), op.reference()

    np.testing.assert_allclose(*both(arrays, scales), atol=2e-6)


def token_bytes(engine):
    runner = engine.engine.runner
    return sum(x.nbytes for x in jax.tree.leaves(runner.cache)) / (runner.num_blocks * runner.block_size)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_come_near_in_less_memory(dtype):
    prompt = np.random.default_rng(2).integers(0, 64, 30).tolist()
    results, sizes = {}, {}
    for store in (None, dtype):
        with serve(serving_models.model(), set={**SIZES, "runner.cache_dtype": store}) as engine:
            (result,) = engine.generate([prompt], max_tokens=1, temperature=0, prompt_logprobs=True)
            results[store] = np.asarray([p.logprob for p in result.prompt_logprobs])
            sizes[store] = token_bytes(engine)
            (again,) = engine.generate([prompt], max_tokens=1, temperature=0, logprobs=0)
            assert again.cached_tokens == 28  # the prefix is reused
            assert again.tokens == result.tokens
    error = np.abs(results[dtype] - results[None]).max()
    print(f"{dtype}: largest error {error:.4f}, {sizes[None] / sizes[dtype]:.2f} times the tokens")
    assert 0 < error < ERROR[dtype]
    # A head of 16 numbers takes 64 bytes in float32, and 16 plus 4 for the scale here.
    assert sizes[None] / sizes[dtype] == pytest.approx(64 / 20)


@pytest.mark.parametrize(("feature", "dtype"), [("cache-int8", "int8"), ("cache-fp8", "float8_e4m3fn")])
def test_features_choose_the_layout(feature, dtype):
    model = resolve("quickstart", with_=[feature]).config.model
    assert [cache.store for cache in find(model, PagedCache).values()] == [dtype]


def test_two_dtypes_are_refused():
    with pytest.raises(RequestError, match=r"attention\.kv_cache\.store: cache-fp8 sets the cache's dtype"):
        resolve("quickstart", with_=["cache-int8", "cache-fp8"])


def test_what_they_refuse():
    with pytest.raises(ConfigError, match=r"attention\.latent_cache: mla caches its latents as computed"):
        serve(serving_models.model("mla"), set={**SIZES, "runner.cache_dtype": "int8"}, warm_up=False)
    with pytest.raises(RequestError, match="cache is in int8"):
        serve(
            serving_models.model(), set={**SIZES, "runner.cache_dtype": "int8", "runner.mode": "parity"}, warm_up=False
        )
