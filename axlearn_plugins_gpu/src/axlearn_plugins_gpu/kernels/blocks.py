"""Block sizes of Triton kernels, by GPU. Imports no JAX.

An entry is chosen by the compute capability of the target. Shared memory bounds them: a stage of the pipeline holds a block of
each operand (in 16 bits), and all stages have to fit in what a block may have.
"""

from collections.abc import Mapping, Sequence

import attrs

from axlearn_plugins_gpu.chips import CHIPS


@attrs.frozen(kw_only=True)
class Blocks:
    """Of a matrix product [m, k] x [k, n]: `warps` run one block of the result, over blocks of k in `stages`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory for operands of 16 bits."""
        return 2 * self.stages * self.k * (self.m + self.n)


GROUPED: dict[tuple[int, int], Blocks] = {
    (8, 0): Blocks(m=128, n=128, k=32, warps=4, stages=4),
    (9, 0): Blocks(m=128, n=128, k=64, warps=8, stages=4),
    (10, 0): Blocks(m=128, n=128, k=64, warps=8, stages=4),
}
"""Of `grouped_matmul`, by compute capability."""


def grouped(target: str) -> Blocks:
    """For a GPU that `CHIPS` knows."""
    return GROUPED[CHIPS[target].capability]


@attrs.frozen(kw_only=True)
class Rows:
    """Of a normalisation: whole rows, so many to a block."""

    rows: int
    warps: int


REGISTERS = 64 * 1024
"""Of 32 bits in a multiprocessor; a block of rows takes a quarter of them at most."""

WIDEST = REGISTERS // 4
"""Numbers in the widest row that is normalised at once."""


def normalized(target: str, rows: int, width: int, per_warp: int) -> Rows:
    """Rows to a block: as many as fit, and so few that every multiprocessor has four blocks.

    Args:
        target: a GPU that `CHIPS` knows.
        rows: how many there are.
        width: of a row, up to `WIDEST`.
        per_warp: numbers for which a warp is worth having.
    """
    padded, block = 1 << (width - 1).bit_length(), 32
    while block > 1 and (block * padded > WIDEST or rows // block < 4 * CHIPS[target].cores):
        block //= 2
    warps = min(4, -(-block * padded // per_warp))
    return Rows(rows=block, warps=1 << (warps - 1).bit_length())


def gated(target: str, rows: int, outer: int) -> Blocks:
    """Of a gated linear unit, whose two products share a block of rows.

    `rows` and `outer` are multiples of 32. Small problems get small blocks, so that every multiprocessor has one.
    """
    m = next(b for b in (128, 64, 32) if rows % b == 0)
    n = next(b for b in (64, 32) if outer % b == 0)
    while m > 32 and (rows // m) * (outer // n) < CHIPS[target].cores:
        m //= 2
    return Blocks(m=m, n=n, k=32, warps=4, stages=4)


@attrs.frozen(kw_only=True)
class AttentionBlocks:
    """Of attention: queries and keys to a block, and stages of the pipeline; in the backward pass (`back_`) others.

    Attributes:
        largest: the largest head that they are for.
        warps: of a block (Triton; Mosaic's are given by its kernels).
    """

    largest: int
    query: int
    key: int
    stages: int
    back_query: int
    back_key: int
    back_stages: int
    warps: int = 4
    back_warps: int = 4


Tables = Mapping[tuple[int, int], Sequence[AttentionBlocks]]

MOSAIC: Tables = {
    (9, 0): (
        AttentionBlocks(largest=128, query=64, key=128, stages=2, back_query=64, back_key=64, back_stages=2),
        AttentionBlocks(largest=256, query=64, key=64, stages=2, back_query=64, back_key=64, back_stages=1),
    ),
}
"""Of `attention` in Mosaic GPU, by compute capability, for larger and larger heads.

None for Blackwell: where no GPU is, Mosaic's compiler takes every GPU for a Hopper, so that nothing about one could be tried.
"""

TRITON_ATTENTION: Tables = {
    capability: (
        AttentionBlocks(largest=128, query=64, key=64, stages=2, back_query=32, back_key=64, back_stages=2),
        AttentionBlocks(largest=256, query=64, key=32, stages=1, back_query=16, back_key=32, back_stages=1),
    )
    for capability in ((8, 0), (9, 0), (10, 0))
}
"""Of `attention` in Triton."""


def attending(tables: Tables, target: str, size: int) -> AttentionBlocks | None:
    """For heads of `size` on a GPU that `CHIPS` knows: None where the table has none, or it is no multiple of 64."""
    if size % 64:
        return None
    return next((b for b in tables.get(CHIPS[target].capability, ()) if size <= b.largest), None)
