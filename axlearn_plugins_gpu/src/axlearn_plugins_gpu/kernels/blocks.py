"""Block sizes for Triton and Mosaic GPU kernels, by GPU. Does not import JAX.

The target's compute capability selects an entry. Shared memory limits the sizes: each pipeline stage stores one block of
each (16-bit) operand, and all stages must fit in a block's shared memory. `source` names the measurement behind an
entry (see `axlearn_plugins_gpu.choices`).
"""

import functools
from collections.abc import Mapping, Sequence

import attrs

from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.choices import NOT_MEASURED


@attrs.frozen(kw_only=True)
class Blocks:
    """Block sizes for a matmul [m, k] x [k, n].

    Each block of the result is computed by `warps` warps, which loop over blocks of k in a pipeline with `stages` stages.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    source: str = NOT_MEASURED

    @property
    def shared(self) -> int:
        """Bytes of shared memory for 16-bit operands."""
        return 2 * self.stages * self.k * (self.m + self.n)


GROUPED: dict[tuple[int, int], Blocks] = {
    (8, 0): Blocks(m=128, n=128, k=32, warps=4, stages=4),
    (9, 0): Blocks(m=128, n=128, k=64, warps=8, stages=4),
    (10, 0): Blocks(m=128, n=128, k=64, warps=8, stages=4),
}
"""Block sizes for `grouped_matmul`, by compute capability."""


def grouped_blocks(target: str) -> Blocks:
    """Return the block sizes that `grouped_matmul` uses on a GPU in `CHIPS`."""
    return GROUPED[CHIPS[target].capability]


@attrs.frozen(kw_only=True)
class PipelinedBlocks:
    """Block sizes for a Mosaic GPU matmul: one block [m, n] of the result, over blocks of k in `stages`.

    Attributes:
        pair: Whether two multiprocessors share a block that is twice as large in both dimensions (Blackwell).
        groups: Maximum number of groups for the older version of tokamax.
        matrices: Number of matrices that each block of rows is multiplied by.
        warp_groups: Number of warp groups, each with its own block of n columns.
        outer: Whether the kernel also multiplies rows by rows, with one result per group (the gradient of the matrices).
    """

    m: int
    n: int
    k: int
    stages: int
    pair: bool = False
    groups: int | None = None
    matrices: int = 1
    warp_groups: int = 1
    outer: bool = True
    source: str = NOT_MEASURED

    @property
    def multiple(self) -> int:
        """Required divisor of both sides of the matrices. Each side is n in one matmul and k in another."""
        return max(self.k, self.n * (2 if self.pair else 1))

    @property
    def shared(self) -> int:
        """Bytes of shared memory for 16-bit operands and a 16-bit result."""
        operands = self.stages * self.k * (self.m + self.matrices * self.n * self.warp_groups)
        return 2 * (operands + self.matrices * self.m * self.n * (2 if self.pair else 1))


GROUPED_MOSAIC: dict[tuple[int, int], PipelinedBlocks] = {
    # tokamax 0.0.12 assigns work to blocks in an unrolled loop over the groups. With 128 groups, each matmul took half a
    # minute to compile.
    (9, 0): PipelinedBlocks(m=128, n=64, k=128, stages=4, groups=32),
    (10, 0): PipelinedBlocks(m=128, n=128, k=128, stages=2, pair=True, outer=False),
}
"""Block sizes for `grouped_matmul` in Mosaic GPU, by compute capability, chosen from the sizes that tokamax itself tries."""

GATED_MOSAIC: dict[tuple[int, int], PipelinedBlocks] = {
    (10, 0): PipelinedBlocks(m=128, n=64, k=64, stages=4, matrices=2),
}
"""Block sizes for `gated_linear_unit` in Mosaic GPU.

Hopper has no entry, because JAX cannot lower tokamax's Hopper kernel, which reshapes a transposed array."""

GATED_MOSAIC_LATER: dict[tuple[int, int], PipelinedBlocks] = {
    **GATED_MOSAIC,
    (9, 0): PipelinedBlocks(m=128, n=64, k=64, stages=4, matrices=2, warp_groups=2),
}
"""The same sizes for the newer version of tokamax, whose Hopper kernel can be lowered."""


@attrs.frozen(kw_only=True)
class Rows:
    """Block size for a normalization, in whole rows."""

    rows: int
    warps: int


REGISTERS = 64 * 1024
"""Number of 32-bit registers per multiprocessor. A block of rows uses at most a quarter of them."""

MAX_WIDTH = REGISTERS // 4
"""Number of elements in the widest row that is normalized in one pass."""


def norm_blocks(target: str, rows: int, width: int, per_warp: int) -> Rows:
    """Return the number of rows per block: as many as fit, but few enough for four blocks per multiprocessor.

    Args:
        target: GPU in `CHIPS`.
        rows: Number of rows.
        width: Number of elements per row, up to `MAX_WIDTH`.
        per_warp: Number of elements that justify a warp.
    """
    padded, block = 1 << (width - 1).bit_length(), 32
    while block > 1 and (block * padded > MAX_WIDTH or rows // block < 4 * CHIPS[target].cores):
        block //= 2
    warps = min(4, -(-block * padded // per_warp))
    return Rows(rows=block, warps=1 << (warps - 1).bit_length())


def gated_blocks(target: str, rows: int, outer: int) -> Blocks:
    """Return the block sizes for a gated linear unit; its two matmuls share a block of rows.

    `rows` and `outer` are multiples of 32. Small problems get small blocks, so that every multiprocessor has one.
    """
    m = next(b for b in (128, 64, 32) if rows % b == 0)
    n = next(b for b in (64, 32) if outer % b == 0)
    while m > 32 and (rows // m) * (outer // n) < CHIPS[target].cores:
        m //= 2
    return Blocks(m=m, n=n, k=32, warps=4, stages=4)


@attrs.frozen(kw_only=True)
class Backward:
    """Block sizes for the backward pass of attention.

    In Mosaic, the gradients of keys and values use the sizes as named. The gradient of the queries uses blocks of `key`
    queries and `query` keys.

    Attributes:
        query: Queries per block.
        key: Keys per block.
        stages: Number of pipeline stages.
        warps: Warps per block (Triton only; Mosaic's kernels determine it).
        longest: Maximum sequence length that is compiled.
    """

    query: int
    key: int
    stages: int
    warps: int = 4
    longest: int | None = None


@attrs.frozen(kw_only=True)
class AttentionBlocks:
    """Block sizes for attention.

    Attributes:
        largest: Maximum head size.
        query: Queries per block.
        key: Keys per block.
        stages: Number of pipeline stages.
        backward: Block sizes for the backward pass, or None if it is not supported.
        multiple: Required divisor of the sequence length.
        splits: Number of parts in which keys and values are loaded (Mosaic on Blackwell).
        warps: Warps per block (Triton only; Mosaic's kernels determine it).
    """

    largest: int
    query: int
    key: int
    stages: int
    backward: Backward | None
    multiple: int = 128
    splits: int = 1
    warps: int = 4
    source: str = NOT_MEASURED


Tables = Mapping[tuple[int, int], Sequence[AttentionBlocks]]

_BLACKWELL = functools.partial(AttentionBlocks, query=256, key=128, multiple=256)
"""A pair of multiprocessors shares 256 queries. All 256 must exist: the first ones determine which keys are visited."""

MOSAIC: Tables = {
    (9, 0): (
        AttentionBlocks(largest=128, query=64, key=128, stages=2, backward=Backward(query=64, key=64, stages=2)),
        AttentionBlocks(largest=256, query=64, key=64, stages=2, backward=Backward(query=64, key=64, stages=1)),
    ),
    (10, 0): (
        _BLACKWELL(largest=64, stages=8, backward=Backward(query=128, key=128, stages=2, longest=4096)),
        _BLACKWELL(largest=128, stages=4, backward=None),
        _BLACKWELL(largest=192, stages=2, backward=None),
        _BLACKWELL(largest=256, stages=2, splits=2, backward=None),
    ),
}
"""Block sizes for `attention` in Mosaic GPU, by compute capability, in order of head size.

Blackwell's backward pass keeps five matmul results per block in tensor memory, which is too small for heads above 64. Its
code is unrolled for every 128 queries: 4,096 queries took almost two minutes to compile.
"""

MOSAIC_LATER: Tables = {
    **MOSAIC,
    (10, 0): (
        _BLACKWELL(largest=64, stages=8, backward=Backward(query=128, key=128, stages=4)),
        _BLACKWELL(largest=128, stages=4, backward=Backward(query=128, key=128, stages=2)),
        _BLACKWELL(largest=192, stages=2, backward=Backward(query=64, key=128, stages=2)),
        _BLACKWELL(largest=256, stages=2, splits=2, backward=None),
    ),
}
"""The same sizes for the newer version of tokamax. Blackwell's backward pass has two kernels, as Hopper's does. Each keeps
fewer matmul results in tensor memory (heads of size 256 still do not fit), and its loop over blocks is not unrolled.
"""

TRITON_ATTENTION: Tables = {
    capability: (
        AttentionBlocks(largest=128, query=64, key=64, stages=2, backward=Backward(query=32, key=64, stages=2)),
        AttentionBlocks(largest=256, query=64, key=32, stages=1, backward=Backward(query=16, key=32, stages=1)),
    )
    for capability in ((8, 0), (9, 0), (10, 0))
}
"""Block sizes for `attention` in Triton."""


def attention_blocks(tables: Tables, target: str, size: int) -> AttentionBlocks | None:
    """Return the sizes for heads of `size` on a GPU in `CHIPS`, or None if the table has no entry or `size % 64 != 0`."""
    if size % 64:
        return None
    return next((b for b in tables.get(CHIPS[target].capability, ()) if size <= b.largest), None)


@attrs.frozen(kw_only=True)
class PagedBlocks:
    """Block sizes for paged attention.

    Attributes:
        rows: Maximum number of query rows per block.
        keys: Number of keys per block, for 16-bit keys with head size 128. Blocks hold fewer keys if the keys are larger.
        warps: Warps per block.
        stages: Number of pipeline stages.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    source: str = NOT_MEASURED


PAGED: dict[tuple[int, int], PagedBlocks] = dict.fromkeys(
    ((8, 0), (9, 0), (10, 0)), PagedBlocks(rows=64, keys=128, warps=8, stages=2)
)
"""Block sizes for `paged_attention`, by compute capability: JAX's defaults for pages of 16 slots, with more rows."""


def paged_blocks(target: str, rows: int, size: int, *, wide: bool) -> PagedBlocks:
    """Return the block sizes for paged attention on a GPU in `CHIPS`.

    Args:
        target: GPU.
        rows: Number of query rows that share their keys.
        size: Head size.
        wide: Whether the operands of the matmuls are 32-bit.
    """
    limits = PAGED[CHIPS[target].capability]
    keys = limits.keys * 128 // max(128, size) // (2 if wide else 1)
    return attrs.evolve(limits, rows=max(16, min(limits.rows, 1 << (rows - 1).bit_length())), keys=keys)


def num_table_parts(target: str, blocks: int, max_parts: int) -> int:
    """Return the number of parts to split a table into, at most `max_parts`, for two blocks per multiprocessor."""
    return max(1, min(max_parts, -(-2 * CHIPS[target].cores // blocks)))
