"""Calls of the op `paged_attention` at sizes that the C++ kernels support."""

import jax.numpy as jnp
import numpy as np

from axlearn_plugins_transformer.kernels.masks import Causal, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split
from axlearn_plugins_transformer.paged_cache import quantize_vectors

INSTRUCTIONS = range(4)
"""0 selects the best instruction set; 1 is the baseline, 2 AVX2, 3 AVX-512."""
REQUESTS = {
    "three tokens": (3, 0, 1, [5, 17, 1]),
    "tokens and chunks": (2, 2, 4, [700, 40, 130, 4]),
    "chunks": (0, 2, 40, [40, 1100]),
    "more than one block": (1, 1, 33, [1300, 50]),
    "several tiles": (0, 1, 200, [333]),
}
"""Numbers of requests with one token, of chunks and of tokens per chunk; then the length of each request, with its new tokens."""


def call(
    requests, *, heads=6, groups=2, size=32, slots=16, dtype="float32", store=None, seed=0, window=None, **options
):
    """Make a call with scattered pages, NaN in unwritten slots, and invalid numbers in unused table entries."""
    singles, chunks, chunk, lengths = REQUESTS[requests] if isinstance(requests, str) else requests
    rng, rows = np.random.default_rng(seed), singles + chunks
    most = max(1, *(-(-n // slots) for n in lengths))
    count = rows * most + 3
    table = rng.permutation(count)[: rows * most].reshape(rows, most).astype(np.int32)
    pages = np.full((count, 2, groups, slots, size), np.nan if store is None else 0, np.float32)
    for row, length in zip(table, lengths, strict=True):
        for at in range(length):
            pages[row[at // slots], :, :, at % slots] = rng.standard_normal((2, groups, size))
        row[-(-length // slots) :] = rng.integers(-5, count + 5, most + -length // slots)
    pages, scales = (jnp.asarray(pages, dtype), None) if store is None else quantize_vectors(jnp.asarray(pages), store)
    query = jnp.asarray(rng.standard_normal((singles + chunks * chunk, heads, size)), dtype)
    starts = [*range(singles), *(singles + chunk * i for i in range(chunks + 1))]
    table, lengths, starts, count = (jnp.asarray(x, jnp.int32) for x in (table, lengths, starts, [rows]))
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    options = {"mask": mask, **options}
    options |= {"scale": 0.2, "heads_first": True, "split": Split(singles, chunk), "scales": scales}
    return PagedAttentionOp(query, pages, table, lengths, starts, count, **options)
