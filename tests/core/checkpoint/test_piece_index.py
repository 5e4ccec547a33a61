"""The tree of pages: which pieces a reader finds, and how many pages it reads for them."""

import hashlib
import itertools
import json
import math
import random

import pytest

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.checkpoint import piece_index as index_module
from axlearn_core.checkpoint.manifest import Index
from axlearn_core.checkpoint.piece_index import IndexReader, write_index
from axlearn_core.checkpoint.shards import DamagedError


class CountingStorage(LocalStorage):
    """Counts the requests that read ranges, and their bytes."""

    def __init__(self, root):
        super().__init__(root)
        self.sizes = []

    def read_into(self, path, begin, buffer):
        self.sizes.append(len(buffer))
        super().read_into(path, begin, buffer)


def split(shape, counts):
    """Return the (start, shape) of each cell of an even grid, in C order."""
    cell = [n // c for n, c in zip(shape, counts, strict=True)]
    corners = itertools.product(*(range(0, n, c) for n, c in zip(shape, cell, strict=True)))
    return [(list(corner), cell) for corner in corners]


def part(process, arrays):
    """Serialize the index of one process. `arrays` maps a path to (shape, cell, pieces as (start, shape))."""
    body, offset = {"files": [], "arrays": {}}, 0
    for path, (shape, cell, pieces) in arrays.items():
        rows = []
        for start, size in pieces:
            rows.append([0, offset, start, size, hashlib.sha256(f"{path}{start}".encode()).hexdigest()])
            offset += 4 * math.prod(size)
        body["arrays"][path] = {"shape": shape, "dtype": "float32", "cell": cell, "pieces": rows}
    body["files"] = [[f"weights/{process}-0.bin", offset]]
    return json.dumps(body).encode()


def shard_job(processes, layouts):
    """Return the part of each process. `layouts` maps a path to (shape, counts); cell i belongs to process i."""
    cells = {path: (shape, split(shape, counts)) for path, (shape, counts) in layouts.items()}
    return [
        part(
            p, {path: (shape, pieces[p][1], [pieces[p]]) for path, (shape, pieces) in cells.items() if p < len(pieces)}
        )
        for p in range(processes)
    ]


def overlapping(box, start, shape):
    return all(low < s + n and s < high for (low, high), s, n in zip(box, start, shape, strict=True))


LAYOUTS = {
    "params.rows": ([64, 8], [64, 1]),
    "params.columns": ([6, 128], [1, 64]),
    "params.both": ([32, 32], [16, 4]),
    "params.few": ([8, 3], [8, 1]),
    "params.scale": ([10], [1]),
    "step": ([], []),
}


@pytest.fixture(params=[(4, 3), (2048, 256)], ids=["deep", "one page"])
def page_sizes(request, monkeypatch):
    for name, value in zip(("LEAF", "BRANCH"), request.param, strict=True):
        monkeypatch.setattr(index_module, name, value)
    return request.param


def test_a_reader_finds_all_pieces_of_its_boxes(tmp_path, page_sizes):
    storage = LocalStorage(tmp_path)
    index = write_index(storage, "4/", shard_job(64, LAYOUTS))
    assert (index.depth > 2) == (page_sizes[0] == 4)
    assert index == Index.from_json(json.loads(json.dumps(index.as_json())))
    dice = random.Random(0)
    for _ in range(200):
        boxes = {}
        for path in dice.sample(sorted(LAYOUTS), 3):
            corners = [sorted(dice.sample(range(n + 1), 2)) for n in LAYOUTS[path][0]]
            boxes[path] = [tuple(map(tuple, corners))]
        arrays = IndexReader(storage, "4/", index).find(boxes | {"absent": [((0, 1),)]})
        assert arrays.keys() == boxes.keys()
        for path, (box,) in boxes.items():
            shape, counts = LAYOUTS[path]
            expected = {tuple(start) for start, size in split(shape, counts) if overlapping(box, start, size)}
            pieces = {p.start: p for p in arrays[path].pieces}
            assert expected <= pieces.keys()
            assert len(pieces) == len(arrays[path].pieces)
            for start, piece in pieces.items():
                assert piece.sha256 == hashlib.sha256(f"{path}{list(start)}".encode()).hexdigest()
    assert IndexReader(storage, "4/", index).find_all().keys() == LAYOUTS.keys()


def test_pieces_may_be_irregular_and_cross_cells(tmp_path, page_sizes):
    """For example if processes have shards of different sizes, or write parts of a shard."""
    dice, storage = random.Random(1), LocalStorage(tmp_path)
    bounds = [0, *sorted(dice.sample(range(1, 500), 60)), 500]
    rows = [[[low], [high - low]] for low, high in itertools.pairwise(bounds)]
    parts = [part(p, {"w": ([500], [3 + p % 9], rows[p::10])}) for p in range(10)]
    index = write_index(storage, "", parts)
    assert index.arrays["w"].cell == (11,)
    assert index.arrays["w"].reach[0] > 0
    for _ in range(200):
        low, high = sorted(dice.sample(range(501), 2))
        (array,) = IndexReader(storage, "", index).find({"w": [((low, high),)]}).values()
        expected = {s[0] for s, n in rows if overlapping([(low, high)], s, n)}
        assert expected <= {p.start[0] for p in array.pieces}


def test_pages_per_process_do_not_grow_with_the_job(tmp_path):
    """The shards of a process are in the same pages, although the index has more of them."""
    counts = {}
    for processes in (64, 512, 4096):
        layouts = {f"params.{i}": ([processes, 2], [processes, 1]) for i in range(8)}
        layouts |= {f"params.t{i}": ([3, processes], [1, processes]) for i in range(8)} | {"params.scale": ([5], [1])}
        storage = CountingStorage(tmp_path / str(processes))
        index = write_index(storage, "", shard_job(processes, layouts))
        worst = 0
        for process in random.Random(2).sample(range(processes), 16):
            storage.sizes.clear()
            boxes = {
                path: [tuple((s, s + n) for s, n in zip(*split(shape, grid)[process % math.prod(grid)], strict=True))]
                for path, (shape, grid) in layouts.items()
            }
            arrays = IndexReader(storage, "", index).find(boxes)
            assert all(array.pieces for array in arrays.values())
            worst = max(worst, sum(storage.sizes))
            assert len(storage.sizes) <= 4
        counts[processes] = worst, len(index.pages)
    assert counts[4096][1] > 30, counts
    assert counts[4096][0] < 4 * 2048 * 150, counts
    assert counts[4096][0] <= 1.2 * counts[512][0], counts


def test_one_flipped_bit_in_a_page_is_found(tmp_path, page_sizes):
    storage = LocalStorage(tmp_path)
    index = write_index(storage, "", shard_job(64, LAYOUTS))
    reader = IndexReader(storage, "", index)
    reader.verify()
    file = tmp_path / "state/index/0.bin"
    data = bytearray(file.read_bytes())
    for position in (0, len(data) // 2, len(data) - 1):
        data[position] ^= 1
        file.write_bytes(data)
        with pytest.raises(DamagedError, match=r"state/index/0.bin: bytes \d+ to \d+: got sha256 .*, expected"):
            IndexReader(storage, "", index).verify()
        with pytest.raises(DamagedError, match=r"got sha256"):
            IndexReader(storage, "", index).find_all()
        data[position] ^= 1
    file.write_bytes(data[:-1])
    with pytest.raises(DamagedError, match="is too short"):
        IndexReader(storage, "", index).verify()
    file.unlink()
    with pytest.raises(DamagedError, match="No such file"):
        IndexReader(storage, "", index).find_all()


def test_pages_are_split_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "LEAF", 4)
    monkeypatch.setattr(index_module, "FILE", 2000)
    storage = LocalStorage(tmp_path)
    index = write_index(storage, "", shard_job(64, LAYOUTS))
    files = list(storage.list("state/index/"))
    assert len(files) > 5
    assert all(f.bytes <= 2000 for f in files)
    assert index.files == 64 + len(files)
    assert index.bytes == sum(f.bytes for f in files) + sum(
        size for p in shard_job(64, LAYOUTS) for _, size in json.loads(p)["files"]
    )
    assert sum(len(x.pieces) for x in IndexReader(storage, "", index).find_all().values()) == sum(
        math.prod(counts) for _, counts in LAYOUTS.values()
    )
