"""Joined reads of small pieces: the number of requests, the memory, and errors."""

import hashlib

import jax
import numpy as np
import pytest

from axlearn_core.checkpoint import LocalStorage, piece_reads, stream
from axlearn_core.checkpoint.shards import DamagedError, Piece, StoredArray

COUNT, COLUMNS = 12, 16


class CountingStorage(LocalStorage):
    """Records the requests, and the bytes of each."""

    def __init__(self, path):
        super().__init__(path)
        self.requests = []

    def read_into(self, path, begin, buffer):
        self.requests.append((path, begin, len(buffer)))
        super().read_into(path, begin, buffer)


class ObjectStore(CountingStorage):
    """A storage whose small reads are joined."""

    joined_bytes = 200


def write(path, *, files=1, count=COUNT, storage=ObjectStore):
    """Store arrays, whose rows are in as many files. Return a storage and the arrays with their values."""
    values = {f"w{i:02}": np.arange(files * COLUMNS, dtype=np.int32).reshape(files, COLUMNS) + i for i in range(count)}
    pieces = {name: [] for name in values}
    storage = storage(path)
    for row in range(files):
        data = b""
        for name, value in values.items():
            part = value[row : row + 1].tobytes()
            digest = hashlib.sha256(part).hexdigest()
            pieces[name].append(Piece(f"weights/{row}-0.bin", len(data), (row, 0), (1, COLUMNS), digest))
            data += part
        storage.write(f"state/weights/{row}-0.bin", [data])
    arrays = {name: StoredArray(name, value.shape, "int32", tuple(pieces[name])) for name, value in values.items()}
    return storage, arrays, values


def check_read(storage, arrays, values):
    result = dict(stream.read_arrays(storage, "state/", arrays, dict.fromkeys(arrays)))
    assert list(result) == list(arrays)
    for name, array in result.items():
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(array, values[name])


def test_neighbours_in_a_file_are_read_with_one_request(tmp_path):
    storage, arrays, values = write(tmp_path, files=3)
    check_read(storage, arrays, values)
    size = COUNT * COLUMNS * 4
    assert sorted(storage.requests) == [(f"state/weights/{row}-0.bin", 0, size) for row in range(3)]


def test_a_request_has_no_bytes_that_are_not_needed(tmp_path):
    storage, arrays, values = write(tmp_path)
    del arrays["w03"], arrays["w04"], arrays["w09"]
    check_read(storage, arrays, values)
    assert sorted((begin // 64, size // 64) for _, begin, size in storage.requests) == [(0, 3), (5, 4), (10, 2)]


def test_requests_have_a_maximum_size(tmp_path, monkeypatch):
    monkeypatch.setattr(piece_reads, "PIECE", 5 * 64)
    storage, arrays, values = write(tmp_path)
    check_read(storage, arrays, values)
    assert sorted(size // 64 for _, _, size in storage.requests) == [2, 5, 5]


@pytest.mark.parametrize("kind", [CountingStorage, ObjectStore])
def test_other_storages_and_larger_pieces_are_read_one_by_one(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(ObjectStore, "joined_bytes", 64)
    storage, arrays, values = write(tmp_path, storage=kind)
    check_read(storage, arrays, values)
    assert [size for _, _, size in storage.requests] == [64] * COUNT


def test_the_memory_of_pieces_that_wait_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(piece_reads, "BUDGET", 2 * COUNT * 64)
    storage, arrays, values = write(
        tmp_path, files=5
    )  # each array needs all files, and each file is needed until the end
    check_read(storage, arrays, values)
    assert sorted(size // 64 for _, _, size in storage.requests) == [1] * 3 * COUNT + [COUNT] * 2


def test_only_the_damaged_piece_fails(tmp_path):
    storage, arrays, values = write(tmp_path)
    file = tmp_path / "state/weights/0-0.bin"
    data = bytearray(file.read_bytes())
    data[5 * 64] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="w05, bytes 320 to 384: got sha256"):
        check_read(storage, arrays, values)
    file.write_bytes(data[: 7 * 64])
    with pytest.raises(DamagedError, match="w05"):
        check_read(storage, arrays, values)
    del arrays["w05"]
    with pytest.raises(DamagedError, match=r"0-0\.bin"):
        check_read(storage, arrays, values)
    for name in ("w07", "w08", "w09", "w10", "w11"):
        del arrays[name]
    check_read(storage, arrays, values)
