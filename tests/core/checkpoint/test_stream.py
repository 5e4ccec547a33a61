"""Reading boxes of an array from its pieces."""

import hashlib

import attrs
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axlearn_core.checkpoint import LocalStorage, stream
from axlearn_core.checkpoint.shards import DamagedError, Piece, StoredArray

VALUE = np.arange(48, dtype=np.int32).reshape(6, 8)


@pytest.fixture
def stored(tmp_path):
    """A storage, and an array in pieces of two rows and four columns."""
    pieces, data = [], b""
    for row in range(0, 6, 2):
        for column in range(0, 8, 4):
            part = VALUE[row : row + 2, column : column + 4].tobytes()
            pieces.append(Piece("weights/0-0.bin", len(data), (row, column), (2, 4), hashlib.sha256(part).hexdigest()))
            data += part
    storage = LocalStorage(tmp_path)
    storage.write("state/weights/0-0.bin", [data])
    return storage, StoredArray("w", (6, 8), "int32", tuple(pieces))


def read(storage, array, *boxes):
    ((path, values),) = stream.read_boxes(storage, "state/", {"w": array}, {"w": boxes})
    assert path == "w"
    return values


@pytest.mark.parametrize("box", [((0, 6), (0, 8)), ((2, 4), (4, 8)), ((1, 5), (3, 7)), ((5, 6), (0, 1))])
def test_a_box_is_read_from_the_pieces_that_it_overlaps(stored, box):
    other = ((0, 1), (0, 8))
    values = read(*stored, box, other)
    assert values.keys() == {box, other}
    for (rows, columns), value in values.items():
        np.testing.assert_array_equal(value, VALUE[slice(*rows), slice(*columns)])


def test_pieces_that_are_missing_or_damaged_are_named(stored, tmp_path):
    storage, array = stored
    fewer = attrs.evolve(array, pieces=array.pieces[1:])
    with pytest.raises(DamagedError, match="w: some of its pieces are missing"):
        read(storage, fewer, ((0, 6), (0, 8)))
    assert read(storage, fewer, ((4, 6), (0, 8)))
    file = tmp_path / "state/weights/0-0.bin"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"state/weights/0-0.bin: w, bytes 32 to 64: got sha256"):
        read(storage, array, ((0, 6), (0, 8)))
    assert read(storage, array, ((0, 6), (0, 4)))


def test_boxes_are_those_of_the_devices_of_this_process(mesh):
    boxes = stream.local_boxes(NamedSharding(mesh, P(None, "fsdp")), (6, 8))
    assert sorted(boxes.values()) == [((0, 6), (i, i + 1)) for i in range(8)]
    assert list(stream.local_boxes(None, (6, 8)).items()) == [(jax.local_devices()[0], ((0, 6), (0, 8)))]
    assert set(stream.local_boxes(None, ()).values()) == {()}
