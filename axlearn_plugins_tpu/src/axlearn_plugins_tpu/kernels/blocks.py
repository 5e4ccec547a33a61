"""Block sizes for kernels, by TPU generation. Does not import JAX.

A larger block reads operands fewer times and uses more of a core's vector memory. The entries are known to compile for
their generation. They are starting points, not measured optima.
"""

from collections.abc import Mapping

import attrs

LANES = 128
"""Number of lanes in a vector register. All block sizes are multiples of this number."""


@attrs.frozen(kw_only=True)
class SplashBlocks:
    """Block sizes for splash attention with heads of up to 512 bytes (256 elements in bfloat16).

    Attributes:
        query: Queries per block, forward.
        key: Keys per block in memory, forward.
        key_compute: Keys per matmul, forward.
        backward_query: Queries per block, backward.
        backward_key: Keys per block in memory, backward.
        backward_key_compute: Keys per matmul, backward.
        max_fused_blocks: Maximum number of key blocks for which the backward pass is one fused kernel. The fused kernel reads
            the operands once instead of twice, but writes one query gradient per block of keys, which are then summed.
    """

    query: int
    key: int
    key_compute: int
    backward_query: int
    backward_key: int
    backward_key_compute: int
    max_fused_blocks: int = 4


@attrs.frozen(kw_only=True)
class GroupedBlocks:
    """Tile sizes for a grouped matmul [M, K] x [G, K, N] in bfloat16; float32 halves the inner size."""

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
"""Block sizes by target. The empty name is for a TPU that is not a known target."""

GROUPED: Mapping[str, GroupedBlocks] = {
    "": GroupedBlocks(rows=128, inner=512, outer=512),
    "tpu-v4": GroupedBlocks(rows=256, inner=512, outer=512),
    "tpu-v5e": GroupedBlocks(rows=512, inner=512, outer=1024),
    "tpu-v5p": GroupedBlocks(rows=512, inner=1024, outer=1024),
    "tpu-v6e": GroupedBlocks(rows=512, inner=1024, outer=1024),
    "tpu-7x": GroupedBlocks(rows=512, inner=1024, outer=1024),
}


def tiles(target: str, rows: int, matrix: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Return the tile sizes for a grouped matmul: rows (a multiple of `LANES`), inner and outer dimension.

    Args:
        target: Name of a TPU target; an unknown name selects the default.
        rows: M.
        matrix: (K, N).
        itemsize: Bytes per element.
    """
    inner, outer = matrix
    blocks = GROUPED.get(target, GROUPED[""])
    tile_rows = min(blocks.rows, -(-rows // LANES) * LANES)
    return tile_rows, min(max(LANES, blocks.inner * 2 // itemsize), inner), min(blocks.outer, outer)


@attrs.frozen(kw_only=True)
class PagedBlocks:
    """Block sizes for paged attention: queries per block, and keys per fetch."""

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
    """Block sizes for the output layer with its loss: positions, and maximum tile sizes of the width and vocabulary."""

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
"""Block sizes by target, as in tokamax."""

MAX_HEAD_BYTES = 512
"""Bytes of the widest head that the entries are meant for."""


def shrink_blocks(blocks: SplashBlocks, head_bytes: int) -> SplashBlocks:
    """Return the blocks for heads of `head_bytes` bytes; wider heads get fewer rows."""
    if head_bytes <= MAX_HEAD_BYTES:
        return blocks
    rows = {f: v * MAX_HEAD_BYTES // head_bytes for f, v in attrs.asdict(blocks).items() if f != "max_fused_blocks"}
    return attrs.evolve(blocks, **rows)


def largest_divisor(length: int, limit: int) -> int:
    """Return the largest multiple of `LANES`, up to `limit`, that divides `length` (itself a multiple of `LANES`)."""
    return max((n for n in range(LANES, min(length, limit) + 1, LANES) if length % n == 0), default=LANES)
