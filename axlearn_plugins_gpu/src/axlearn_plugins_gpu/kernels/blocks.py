"""Block sizes of kernels in Triton and Mosaic GPU, by GPU. Imports no JAX.

An entry is chosen by the compute capability of the target. Shared memory bounds them: a stage of the pipeline holds a block of
each operand (in 16 bits), and all stages have to fit in what a block may have. `source` of an entry names the measurement that it
follows (`axlearn_plugins_gpu.choices`).
"""

import functools
from collections.abc import Mapping, Sequence

import attrs

from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.choices import NOT_MEASURED


@attrs.frozen(kw_only=True)
class Blocks:
    """Of a matrix product [m, k] x [k, n]: `warps` run one block of the result, over blocks of k in `stages`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    source: str = NOT_MEASURED

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
class PipelinedBlocks:
    """Of a matrix product in Mosaic GPU: one block of the result [m, n], over blocks of k in `stages`.

    Attributes:
        pair: whether two multiprocessors share a block of twice the size in both directions (Blackwell).
        groups: the most that the earlier of tokamax's versions takes.
        matrices: that each block of rows is multiplied with at once.
        beside: groups of warps beside one another, each with a block of n columns.
        outer: whether it has the product of rows with rows, one for each group, too.
    """

    m: int
    n: int
    k: int
    stages: int
    pair: bool = False
    groups: int | None = None
    matrices: int = 1
    beside: int = 1
    outer: bool = True
    source: str = NOT_MEASURED

    @property
    def multiple(self) -> int:
        """Of the sides of the matrices, which are n of one product and k of another."""
        return max(self.k, self.n * (2 if self.pair else 1))

    @property
    def shared(self) -> int:
        """Bytes of shared memory for operands and a result of 16 bits."""
        operands = self.stages * self.k * (self.m + self.matrices * self.n * self.beside)
        return 2 * (operands + self.matrices * self.m * self.n * (2 if self.pair else 1))


GROUPED_MOSAIC: dict[tuple[int, int], PipelinedBlocks] = {
    # What a block has to do tokamax 0.0.12 finds by a loop over the groups, unrolled: 128 took half a minute to compile, for each
    # product.
    (9, 0): PipelinedBlocks(m=128, n=64, k=128, stages=4, groups=32),
    (10, 0): PipelinedBlocks(m=128, n=128, k=128, stages=2, pair=True, outer=False),
}
"""Of `grouped_matmul` in Mosaic GPU, by compute capability; among the sizes that tokamax itself tries."""

GATED_MOSAIC: dict[tuple[int, int], PipelinedBlocks] = {
    (10, 0): PipelinedBlocks(m=128, n=64, k=64, stages=4, matrices=2),
}
"""Of `gated_linear_unit` in Mosaic GPU. tokamax's kernel for Hopper reshapes what it has transposed, which JAX cannot lower."""

GATED_MOSAIC_LATER: dict[tuple[int, int], PipelinedBlocks] = {
    **GATED_MOSAIC,
    (9, 0): PipelinedBlocks(m=128, n=64, k=64, stages=4, matrices=2, beside=2),
}
"""The same for the later of tokamax's versions, whose kernel for Hopper does not."""


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
class Backward:
    """Of the backward pass of attention: queries and keys to a block, and stages of the pipeline.

    Attributes:
        warps: of a block (Triton; Mosaic's are given by its kernels).
        longest: positions up to which it is compiled.

    In Mosaic the gradients by keys and values take the blocks as they are named; the one by queries takes `key` queries and
    `query` keys.
    """

    query: int
    key: int
    stages: int
    warps: int = 4
    longest: int | None = None


@attrs.frozen(kw_only=True)
class AttentionBlocks:
    """Of attention: queries and keys to a block, and stages of the pipeline.

    Attributes:
        largest: the largest head that they are for.
        back: of the backward pass; None where there is none.
        multiple: of the length.
        splits: parts in which keys and values are fetched (Mosaic on Blackwell).
        warps: of a block (Triton; Mosaic's are given by its kernels).
    """

    largest: int
    query: int
    key: int
    stages: int
    back: Backward | None
    multiple: int = 128
    splits: int = 1
    warps: int = 4
    source: str = NOT_MEASURED


Tables = Mapping[tuple[int, int], Sequence[AttentionBlocks]]

_BLACKWELL = functools.partial(AttentionBlocks, query=256, key=128, multiple=256)
"""A pair of multiprocessors shares 256 queries, which all have to be there: the first of them decide which keys are visited."""

MOSAIC: Tables = {
    (9, 0): (
        AttentionBlocks(largest=128, query=64, key=128, stages=2, back=Backward(query=64, key=64, stages=2)),
        AttentionBlocks(largest=256, query=64, key=64, stages=2, back=Backward(query=64, key=64, stages=1)),
    ),
    (10, 0): (
        _BLACKWELL(largest=64, stages=8, back=Backward(query=128, key=128, stages=2, longest=4096)),
        _BLACKWELL(largest=128, stages=4, back=None),
        _BLACKWELL(largest=192, stages=2, back=None),
        _BLACKWELL(largest=256, stages=2, splits=2, back=None),
    ),
}
"""Of `attention` in Mosaic GPU, by compute capability, for larger and larger heads.

Blackwell's backward pass keeps five products of a block in tensor memory, which has no room for heads of more than 64; and its code
repeats itself for every 128 queries: 4,096 took almost two minutes to compile.
"""

MOSAIC_LATER: Tables = {
    **MOSAIC,
    (10, 0): (
        _BLACKWELL(largest=64, stages=8, back=Backward(query=128, key=128, stages=4)),
        _BLACKWELL(largest=128, stages=4, back=Backward(query=128, key=128, stages=2)),
        _BLACKWELL(largest=192, stages=2, back=Backward(query=64, key=128, stages=2)),
        _BLACKWELL(largest=256, stages=2, splits=2, back=None),
    ),
}
"""The same for the later of tokamax's versions: Blackwell's backward pass is two kernels, as Hopper's is, each with fewer products
in tensor memory (heads of 256 still have no room) and a loop over blocks that is not unrolled.
"""

TRITON_ATTENTION: Tables = {
    capability: (
        AttentionBlocks(largest=128, query=64, key=64, stages=2, back=Backward(query=32, key=64, stages=2)),
        AttentionBlocks(largest=256, query=64, key=32, stages=1, back=Backward(query=16, key=32, stages=1)),
    )
    for capability in ((8, 0), (9, 0), (10, 0))
}
"""Of `attention` in Triton."""


def attending(tables: Tables, target: str, size: int) -> AttentionBlocks | None:
    """For heads of `size` on a GPU that `CHIPS` knows: None where the table has none, or it is not a multiple of 64."""
    if size % 64:
        return None
    return next((b for b in tables.get(CHIPS[target].capability, ()) if size <= b.largest), None)


@attrs.frozen(kw_only=True)
class PagedBlocks:
    """Of attention to pages: rows of queries and keys to a block, and stages of the pipeline.

    Attributes:
        rows: at most.
        keys: of 16 bits with heads of 128 numbers; wider ones are fewer.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    source: str = NOT_MEASURED


PAGED: dict[tuple[int, int], PagedBlocks] = dict.fromkeys(
    ((8, 0), (9, 0), (10, 0)), PagedBlocks(rows=64, keys=128, warps=8, stages=2)
)
"""Of `paged_attention`, by compute capability: the library's own with pages of 16 slots, but for the rows, of which it has 16."""


def paged(target: str, rows: int, size: int, *, wide: bool) -> PagedBlocks:
    """For so many rows of queries with heads of `size` on a GPU that `CHIPS` knows.

    Args:
        target: the GPU.
        rows: that share their keys.
        size: of a head.
        wide: whether numbers of 32 bits are multiplied.
    """
    most = PAGED[CHIPS[target].capability]
    keys = most.keys * 128 // max(128, size) // (2 if wide else 1)
    return attrs.evolve(most, rows=max(16, min(most.rows, 1 << (rows - 1).bit_length())), keys=keys)


def parts_of_table(target: str, blocks: int, most: int) -> int:
    """Into how many parts, `most` at most, a table is split, so that every multiprocessor has two blocks."""
    return max(1, min(most, -(-2 * CHIPS[target].cores // blocks)))
