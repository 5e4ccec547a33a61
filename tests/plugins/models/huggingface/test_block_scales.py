"""Numbers of 4 and 8 bits, packed integers, and scales of blocks, with values made by hand."""

import numpy as np
import pytest

from axlearn_plugins_models.huggingface.block_scales import (
    apply_to_blocks,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    grid_shape,
    unpack_integers,
)


def test_every_4_bit_float():
    packed = np.array([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], np.uint8)  # the low bits are first
    values = decode_e2m1(packed)
    assert values.dtype == np.float32
    assert values.tolist() == [[0, 0.5, 1, 1.5, 2, 3, 4, 6], [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]]
    assert np.signbit(values[1]).all()
    assert not np.signbit(values[0]).any()


@pytest.mark.parametrize(
    ("code", "value"),
    [(0x00, 0.0), (0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x08, 2.0**-6), (0x38, 1.0), (0x39, 1.125), (0x7E, 448.0), (0xFE, -448.0)],
)  # fmt: skip
def test_8_bit_floats(code, value):
    assert decode_e4m3(np.array([code], np.uint8)).tolist() == [value]


def test_8_bit_floats_have_no_infinity():
    values = decode_e4m3(np.arange(256, dtype=np.uint8))
    assert np.isnan(values).nonzero()[0].tolist() == [0x7F, 0xFF]
    assert not np.isinf(values).any()


def test_powers_of_two():
    values = decode_e8m0(np.array([0, 1, 126, 127, 128, 254, 255], np.uint8))
    assert values[:-1].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]  # the first is subnormal
    assert np.isnan(values[-1])


def test_integers_that_compressed_tensors_packed():
    """The words are results of `pack_to_int32` of compressed-tensors 0.20."""
    four = np.array([[0x4BF98710, 0x6D]], np.uint32).view(np.int32)
    assert unpack_integers(four, 4, 10).tolist() == [[-8, -7, -1, 0, 1, 7, 3, -4, 5, -2]]
    eight = np.array([[0x81807F00, 0xFF]], np.uint32).view(np.int32)
    assert unpack_integers(eight, 8, 5).tolist() == [[-128, -1, 0, 1, 127]]
    along_rows = np.array([[0xA59]], np.uint32).view(np.int32)
    assert unpack_integers(along_rows.T, 4, 3).T.tolist() == [[1], [-3], [2]]


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((256, 384), (128, 128), (2, 3)),
        ((130, 7), (128, 128), (2, 1)),
        ((4, 130, 129), (128, 128), (4, 2, 2)),
        ((3, 64), (1, 32), (3, 2)),
    ],
)
def test_blocks_at_the_edges_are_smaller(shape, block, expected):
    assert grid_shape(shape, block) == expected


@pytest.mark.parametrize("first", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
def test_each_block_has_its_scale(shape, first):
    block = (3, 2)
    values = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    grid = 2.0 ** np.arange(np.prod(grid_shape(shape, block)), dtype=np.float32).reshape(grid_shape(shape, block))
    expected = values * np.repeat(np.repeat(grid, 3, axis=-2), 2, axis=-1)[..., :7, :5]
    rows = values[..., first:, :].copy()  # a slice that begins within a block
    apply_to_blocks(np.multiply, rows, grid[..., first // 3 :, :], block, first % 3)
    assert np.array_equal(rows, expected[..., first:, :])


@pytest.mark.parametrize(("grid", "block"), [([[4.0]], (7, 5)), ([[2.0]] * 7, (1, 5))], ids=["tensor", "channel"])
def test_a_scale_may_span_an_axis(grid, block):
    values = np.ones((7, 5), np.float32)
    apply_to_blocks(np.multiply, values, np.asarray(grid, np.float32), block)
    assert (values == grid[0][0]).all()
