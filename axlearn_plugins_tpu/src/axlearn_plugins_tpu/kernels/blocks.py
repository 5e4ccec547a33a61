"""How large the blocks of each kernel are on each generation of TPUs, as data. Imports no JAX.

A larger block reads operands fewer times and takes more of a core's vector memory. The entries compile for their generation;
they are a start and no result of measurements.
"""

from collections.abc import Mapping

import attrs

LANES = 128
"""Numbers side by side in a vector register: what all blocks are multiples of."""


@attrs.frozen(kw_only=True)
class SplashBlocks:
    """Rows per block of splash attention, for heads of up to 512 bytes (256 numbers in bfloat16).

    Attributes:
        query: queries, forward.
        key: keys in memory, forward.
        key_compute: keys per product, forward.
        backward_query: queries, backward.
        backward_key: keys in memory, backward.
        backward_key_compute: keys per product, backward.
        fused_up_to: blocks of keys up to which the backward pass is one kernel. That one writes the gradients by the
            queries once per block of keys, to be summed, and reads everything once instead of twice.
    """

    query: int
    key: int
    key_compute: int
    backward_query: int
    backward_key: int
    backward_key_compute: int
    fused_up_to: int = 4


@attrs.frozen(kw_only=True)
class GroupedBlocks:
    """Tiles of a grouped matrix product [M, K] x [G, K, N] in bfloat16; in float32 the inner size is half of that."""

    rows: int
    inner: int
    outer: int


SPLASH: Mapping[str, SplashBlocks] = {
    "": SplashBlocks(
        query=512, key=512, key_compute=512, backward_query=512, backward_key=512, backward_key_compute=512
    ),
    "tpu-v4": SplashBlocks(
        query=512, key=512, key_compute=512, backward_query=512, backward_key=512, backward_key_compute=512
    ),
    "tpu-v5e": SplashBlocks(
        query=512, key=1024, key_compute=512, backward_query=512, backward_key=1024, backward_key_compute=512
    ),
    "tpu-v5p": SplashBlocks(
        query=1024, key=1024, key_compute=512, backward_query=1024, backward_key=1024, backward_key_compute=512
    ),
    "tpu-v6e": SplashBlocks(
        query=1024, key=1024, key_compute=1024, backward_query=1024, backward_key=1024, backward_key_compute=1024
    ),
    "tpu-7x": SplashBlocks(
        query=1024, key=1024, key_compute=1024, backward_query=1024, backward_key=1024, backward_key_compute=1024
    ),
}
"""By target; the empty name is for a TPU that no target knows."""

GROUPED: Mapping[str, GroupedBlocks] = {
    "": GroupedBlocks(rows=128, inner=512, outer=512),
    "tpu-v4": GroupedBlocks(rows=256, inner=512, outer=512),
    "tpu-v5e": GroupedBlocks(rows=512, inner=512, outer=1024),
    "tpu-v5p": GroupedBlocks(rows=512, inner=1024, outer=1024),
    "tpu-v6e": GroupedBlocks(rows=512, inner=1024, outer=1024),
    "tpu-7x": GroupedBlocks(rows=512, inner=1024, outer=1024),
}


def tiles(target: str, rows: int, matrix: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """The tiles of a grouped product: rows (a multiple of `LANES`), and of the inner and the outer dimension.

    Args:
        target: a TPU, or another name for one that no target knows.
        rows: M.
        matrix: (K, N).
        itemsize: bytes of a number.
    """
    inner, outer = matrix
    blocks = GROUPED.get(target, GROUPED[""])
    fewest = min(blocks.rows, -(-rows // LANES) * LANES)
    return fewest, min(max(LANES, blocks.inner * 2 // itemsize), inner), min(blocks.outer, outer)


@attrs.frozen(kw_only=True)
class PagedBlocks:
    """Of paged attention: queries to a block, and keys that are fetched together."""

    queries: int
    keys: int


PAGED: Mapping[str, PagedBlocks] = {
    "": PagedBlocks(queries=32, keys=512),
    "tpu-v4": PagedBlocks(queries=32, keys=256),
    "tpu-v5e": PagedBlocks(queries=32, keys=512),
    "tpu-v5p": PagedBlocks(queries=32, keys=512),
    "tpu-v6e": PagedBlocks(queries=32, keys=1024),
    "tpu-7x": PagedBlocks(queries=32, keys=1024),
}


@attrs.frozen(kw_only=True)
class LossBlocks:
    """Of the output layer with its loss: positions, and the most of the width and of the vocabulary in a tile."""

    rows: int = 1024
    width: int = 512
    vocabulary: int


LOSS: Mapping[str, LossBlocks] = {
    "": LossBlocks(vocabulary=512),
    "tpu-v5e": LossBlocks(vocabulary=512),
    "tpu-v5p": LossBlocks(vocabulary=512),
    "tpu-v6e": LossBlocks(vocabulary=2048),
    "tpu-7x": LossBlocks(vocabulary=2048),
}
"""As tokamax has them by generation."""

WIDEST = 512
"""Bytes of a head for which the entries are meant."""


def narrowed(blocks: SplashBlocks, head_bytes: int) -> SplashBlocks:
    """The blocks for heads of so many bytes: of wider ones fewer rows fit."""
    if head_bytes <= WIDEST:
        return blocks
    rows = {f: v * WIDEST // head_bytes for f, v in attrs.asdict(blocks).items() if f != "fused_up_to"}
    return attrs.evolve(blocks, **rows)


def fitting(length: int, most: int) -> int:
    """The largest multiple of `LANES` up to `most` that divides `length`, which is such a multiple itself."""
    return max((n for n in range(LANES, min(length, most) + 1, LANES) if length % n == 0), default=LANES)
