"""Convert quantized values to float32: floats of 4 and 8 bits, packed integers, and scales of blocks.

Sources: OCP Microscaling Formats (MX) 1.0 for e2m1 and e8m0, and the layouts of transformers (`integrations/mxfp4.py`,
`integrations/finegrained_fp8.py`) and compressed-tensors (`pack_to_int32`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=-1).view(np.uint64).reshape(-1)
"""Two values for each byte, as one number of 64 bits, because looking up one number is faster."""
_PART = 1 << 16
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def _look_up(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return `table[codes]` for bytes, in parts, because NumPy converts each code to an index of 8 bytes."""
    flat = codes.reshape(-1).view(np.uint8)
    values = np.empty(flat.shape, table.dtype)
    for begin in range(0, flat.size, _PART):
        np.take(table, flat[begin : begin + _PART], out=values[begin : begin + _PART], mode="clip")
    return values.reshape(codes.shape)


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
    """Return the values of 4-bit floats: uint8 [..., N], low bits first -> float32 [..., 2 N]."""
    return _look_up(_PAIRS, packed).view(np.float32)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the values of 8-bit floats with a sign, 4 bits of exponent and 3 of mantissa. The codes 0x7F and 0xFF are NaN."""
    return _look_up(_E4M3, codes)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """Return 2^(code - 127) for each uint8. The code 0xFF is NaN."""
    return _look_up(_E8M0, codes)


def unpack_integers(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return signed integers of 4 or 8 bits that are stored with an offset: int32 [..., W] -> float32 [..., count].

    The lowest bits of a word hold the first integer.
    """
    codes = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*words.shape[:-1], -1)
    return codes[..., :count].astype(np.float32) - np.float32(1 << (bits - 1))


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each axis. The blocks divide the last two axes; the last ones may be smaller."""
    return (*shape[:-2], *(math.ceil(size / step) for size, step in zip(shape[-2:], block, strict=True)))


def apply_to_blocks(
    operation: Callable[..., Any], values: np.ndarray, grid: np.ndarray, block: Sequence[int], first_row: int = 0
) -> None:
    """Apply `operation`, such as `np.multiply`, to the values of each block and the block's number, in place.

    Args:
        operation: Binary function with an argument `out`.
        values: float32 [..., M, N].
        grid: Number of each block, float32 [..., ceil(M / block[0]), ceil(N / block[1])].
        block: Size of a block.
        first_row: Index of the first of the M rows within its block.
    """
    columns, step = values.shape[-1], block[0]
    for index in np.ndindex(values.shape[:-2]):
        matrix, numbers = values[index], grid[index]
        if numbers.shape[1] > 1:
            numbers = np.repeat(numbers, block[1], axis=1)[:, :columns]
        if step == 1 or len(numbers) == 1:
            operation(matrix, numbers, out=matrix)
            continue
        for i, line in enumerate(numbers):
            part = matrix[max(0, i * step - first_row) : (i + 1) * step - first_row]
            operation(part, line, out=part)
