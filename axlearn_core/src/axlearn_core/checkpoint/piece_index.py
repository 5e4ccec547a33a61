"""The index of a checkpoint: a tree of pages with the pieces of all arrays, so that readers fetch only the pages they need.

    index/0.bin    pages, one after the other; a file ends after `FILE` bytes

Process 0 merges the pieces of all processes when it commits a checkpoint. Leaf pages contain at most `LEAF` pieces, and inner
pages refer to at most `BRANCH` pages. The manifest contains the root, so its size does not depend on the number of processes.

Each array is divided into a grid of cells, which normally are its shards. Pieces are sorted by the relative position of their
cell in the grid. The shards of a process have the same relative position in all arrays that are sharded over the same mesh
axes, so a process that restores its shards reads a few pages, for any number of processes.
"""

import bisect
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import attrs

from axlearn_core.checkpoint.manifest import STATE, Index, IndexedArray, Key, Page
from axlearn_core.checkpoint.shards import FILE, Box, DamagedError, Piece, StoredArray
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError

LEAF, BRANCH = 2048, 256
"""Maximum number of pieces in a leaf page, and of pages in an inner page or the root."""
POSITIONS = 2**40
"""Number of relative positions in a grid of cells."""
GROUP = 8 * 2**20
"""Maximum bytes of consecutive pages that are read with one request."""
FOLDER = f"{STATE}/index/"


def write_index(storage: Storage, root: str, parts: Iterable[bytes]) -> Index:
    """Merge the indices of all processes, and write the pages.

    Args:
        storage: Storage of the checkpoint.
        root: Staging folder of the checkpoint, with a trailing `/`.
        parts: Output of `shards.render_index` for each process.

    Returns:
        The root of the index, for the manifest.
    """
    bodies = [json.loads(part) for part in parts]
    files = [file for body in bodies for file in body["files"]]
    arrays = _merge_arrays(bodies)
    pages = _PageWriter(storage, root)
    level = pages.add_leaves(_sort_pieces(bodies, arrays))
    depth = 1
    while len(level) > BRANCH:
        level = [pages.add_branch(level[i : i + BRANCH]) for i in range(0, len(level), BRANCH)]
        depth += 1
    sizes = pages.finish()
    return Index(depth, tuple(level), arrays, len(files) + len(sizes), sum(size for _, size in files) + sum(sizes))


def _merge_arrays(bodies: Sequence[Mapping[str, Any]]) -> dict[str, IndexedArray]:
    """Return the grid of each array. A cell is as large as the largest shard."""
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    cells: dict[str, list[int]] = {}
    items = [(path, info) for body in bodies for path, info in body["arrays"].items()]
    for path, info in items:
        facts.setdefault(path, (tuple(info["shape"]), info["dtype"]))
        largest = cells.setdefault(path, list(info["cell"]))
        largest[:] = map(max, largest, info["cell"])
    reach = {path: [0] * len(cell) for path, cell in cells.items()}
    for path, info in items:
        cell, most = cells[path], reach[path]
        for _, _, start, shape, _ in info["pieces"]:
            for axis, (begin, length) in enumerate(zip(start, shape, strict=True)):
                most[axis] = max(most[axis], (begin % cell[axis] + length - 1) // cell[axis])
    return {
        path: IndexedArray(*facts[path], cell=tuple(cells[path]), reach=tuple(reach[path])) for path in sorted(facts)
    }


def _sort_pieces(
    bodies: Sequence[Mapping[str, Any]], arrays: Mapping[str, IndexedArray]
) -> list[tuple[int, str, tuple[int, ...], tuple[int, ...], str, int, str]]:
    """Return (position, path, start, shape, file, offset, hash) of each piece, sorted."""
    rows = []
    for body in bodies:
        names = [name for name, _ in body["files"]]
        for path, info in body["arrays"].items():
            grid = _Grid(arrays[path])
            for number, offset, start, shape, sha in info["pieces"]:
                rows.append(
                    (grid.position(grid.rank(start)), path, tuple(start), tuple(shape), names[number], offset, sha)
                )
    rows.sort()
    return rows


class _Grid:
    """The cells of an array, ranked in C order."""

    def __init__(self, array: IndexedArray):
        self.array = array
        self.counts = [-(-size // cell) for size, cell in zip(array.shape, array.cell, strict=True)]
        self.strides = [math.prod(self.counts[axis + 1 :]) for axis in range(len(self.counts))]
        self.size = math.prod(self.counts)

    def rank(self, start: Sequence[int]) -> int:
        """Return the rank of the cell that contains an element."""
        return sum(s // c * n for s, c, n in zip(start, self.array.cell, self.strides, strict=True))

    def position(self, rank: int) -> int:
        """Return the relative position of a cell."""
        return rank * POSITIONS // self.size

    def runs(self, box: Box) -> Iterator[tuple[int, int]]:
        """Yield the first and last rank of each run of cells in which pieces that overlap a box may start."""
        bounds = [
            (max(0, low // cell - reach), (high - 1) // cell)
            for (low, high), cell, reach in zip(box, self.array.cell, self.array.reach, strict=True)
        ]
        inner = len(bounds)  # axes from here on are complete, so that their cells are consecutive
        while inner and bounds[inner - 1] == (0, self.counts[inner - 1] - 1):
            inner -= 1
        outer = max(inner - 1, 0)
        for corner in product(*(range(low, high + 1) for low, high in bounds[:outer])):
            base = sum(c * n for c, n in zip(corner, self.strides, strict=False))
            if not inner:
                yield 0, self.size - 1
                continue
            (low, high), stride = bounds[outer], self.strides[outer]
            yield base + low * stride, base + (high + 1) * stride - 1


class _PageWriter:
    """Appends pages to index files."""

    def __init__(self, storage: Storage, root: str):
        self.storage, self.root = storage, root
        self._chunks: list[bytes] = []
        self._size, self._sizes = 0, list[int]()

    def add_leaves(self, rows: Sequence[Any]) -> list[Page]:
        """Add pages with sorted pieces."""
        pages = []
        for begin in range(0, len(rows), LEAF):
            group = rows[begin : begin + LEAF]
            files = {name: number for number, name in enumerate(dict.fromkeys(row[4] for row in group))}
            pieces: dict[str, list[Any]] = {}
            for _, path, start, shape, file, offset, sha in group:
                pieces.setdefault(path, []).append([files[file], offset, start, shape, sha])
            pages.append(self._add(group[0][:3], {"files": list(files), "pieces": pieces}))
        return pages

    def add_branch(self, pages: Sequence[Page]) -> Page:
        """Add a page that refers to other pages."""
        return self._add(pages[0].first, {"pages": [attrs.astuple(page) for page in pages]})

    def finish(self) -> list[int]:
        """Write the last file. Return the sizes of all files."""
        if self._chunks:
            self._write()
        return self._sizes

    def _add(self, first: Key, body: Mapping[str, Any]) -> Page:
        data = json.dumps(body, separators=(",", ":")).encode()
        if self._size + len(data) > FILE and self._chunks:
            self._write()
        page = Page(first, len(self._sizes), self._size, len(data), hashlib.sha256(data).hexdigest())
        self._chunks.append(data)
        self._size += len(data)
        return page

    def _write(self) -> None:
        self.storage.write(f"{self.root}{FOLDER}{len(self._sizes)}.bin", self._chunks)
        self._sizes.append(self._size)
        self._chunks, self._size = [], 0


class IndexReader:
    """Reads the pages of an index on demand, and verifies their hashes.

    Args:
        storage: Storage of the checkpoint.
        root: Folder of the checkpoint, with a trailing `/`.
        index: Root of the index.
    """

    def __init__(self, storage: Storage, root: str, index: Index):
        self.storage, self.root, self.index = storage, root, index
        self._pages: dict[Page, Any] = {}

    def find(self, boxes: Mapping[str, Collection[Box]]) -> dict[str, StoredArray]:
        """Return arrays with all pieces that may overlap some boxes.

        Args:
            boxes: Boxes by array path. Arrays that are not in the index are skipped.

        Raises:
            DamagedError: If a page is damaged or missing.
        """
        spans = {path: list(self._spans(path, boxes[path])) for path in boxes if path in self.index.arrays}
        level: Collection[Page] = self.index.pages
        for _ in range(self.index.depth - 1):
            level = [child for body in self._read(_select(level, spans)) for child in _children(body)]
        pieces: dict[str, list[Piece]] = {path: [] for path in spans}
        for body in self._read(_select(level, spans)):
            for path in sorted(pieces.keys() & body["pieces"].keys()):
                pieces[path] += _parse_pieces(body, path)
        return {path: self._array(path, pieces[path]) for path in spans}

    def find_all(self) -> dict[str, StoredArray]:
        """Return all arrays with all pieces. Raise `DamagedError` if a page is damaged."""
        return self.find({path: [tuple((0, n) for n in x.shape)] for path, x in self.index.arrays.items()})

    def verify(self) -> None:
        """Verify the hashes of all pages. Raise `DamagedError` if a page is damaged."""
        level: Collection[Page] = self.index.pages
        for _ in range(self.index.depth - 1):
            level = [child for body in self._read(level) for child in _children(body)]
        self._fetch(level, parse=False)

    def _array(self, path: str, pieces: Sequence[Piece]) -> StoredArray:
        info = self.index.arrays[path]
        return StoredArray(path, info.shape, info.dtype, tuple(pieces))

    def _spans(self, path: str, boxes: Iterable[Box]) -> Iterator[tuple[Any, Any]]:
        """Yield the smallest and largest key of the pieces of each run of cells."""
        grid = _Grid(self.index.arrays[path])
        for box in boxes:
            for low, high in grid.runs(box):
                yield (grid.position(low), path, ()), (grid.position(high), path, (math.inf,))

    def _read(self, pages: Collection[Page]) -> list[Any]:
        """Return the contents of pages."""
        self._pages |= self._fetch([page for page in pages if page not in self._pages], parse=True)
        return [self._pages[page] for page in pages]

    def _fetch(self, pages: Collection[Page], *, parse: bool) -> dict[Page, Any]:
        """Read pages. Pages that are next to each other are read with one request."""
        groups: list[list[Page]] = []
        for page in sorted(pages, key=lambda p: (p.file, p.offset)):
            last = groups[-1] if groups else []
            end = last[-1].offset + last[-1].bytes if last else 0
            if last and (last[-1].file, end) == (page.file, page.offset) and end + page.bytes - last[0].offset <= GROUP:
                last.append(page)
            else:
                groups.append([page])
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            results = pool.map(lambda group: self._read_group(group, parse=parse), groups)
            return {page: body for bodies in results for page, body in bodies.items()}

    def _read_group(self, pages: Sequence[Page], *, parse: bool) -> dict[Page, Any]:
        name, begin = f"{FOLDER}{pages[0].file}.bin", pages[0].offset
        data = bytearray(pages[-1].offset + pages[-1].bytes - begin)
        try:
            self.storage.read_into(f"{self.root}{name}", begin, memoryview(data))
        except StorageError as error:
            raise DamagedError(f"{name}: {str(error).splitlines()[0]}") from error
        bodies = {}
        for page in pages:
            part = bytes(data[page.offset - begin : page.offset - begin + page.bytes])
            if (digest := hashlib.sha256(part).hexdigest()) != page.sha256:
                raise DamagedError(
                    f"{name}: bytes {page.offset} to {page.offset + page.bytes}: got sha256 {digest[:16]}, "
                    f"expected {page.sha256[:16]}"
                )
            if parse:
                bodies[page] = json.loads(part)
        return bodies


def _select(pages: Collection[Page], spans: Mapping[str, Sequence[tuple[Any, Any]]]) -> list[Page]:
    """Return the pages that may contain keys in some spans. `pages` are sorted."""
    pages = list(pages)
    keys = [page.first for page in pages]
    numbers: set[int] = set()
    for low, high in (span for spans_of_path in spans.values() for span in spans_of_path):
        begin = max(bisect.bisect_right(keys, low) - 1, 0)
        numbers.update(range(begin, bisect.bisect_right(keys, high)))
    return [pages[n] for n in sorted(numbers)]


def _children(body: Mapping[str, Any]) -> list[Page]:
    return [Page.from_json(row) for row in body["pages"]]


def _parse_pieces(body: Mapping[str, Any], path: str) -> list[Piece]:
    files = body["files"]
    return [
        Piece(files[number], offset, tuple(start), tuple(shape), sha)
        for number, offset, start, shape, sha in body["pieces"][path]
    ]
