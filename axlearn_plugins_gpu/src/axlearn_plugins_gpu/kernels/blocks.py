"""Block sizes of Triton kernels, by GPU. Imports no JAX.

An entry is chosen by the compute capability of the target. Shared memory bounds them: a stage of the pipeline holds a block of
each operand (in 16 bits), and all stages have to fit in what a block may have.
"""

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
