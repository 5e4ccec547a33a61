"""Save the shards of one process: copy them to host memory, then hash and write them in threads."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np

from axlearn_core.checkpoint.manifest import NON_WEIGHTS, STATE, WEIGHTS
from axlearn_core.checkpoint.shards import (
    FILE,
    SMALL,
    BinaryFile,
    Part,
    is_weight,
    iter_local_shards,
    iter_saved_shards,
    render_index,
    split_shape,
)
from axlearn_core.contracts.storage import Storage


class HostBuffers:
    """Host memory for copies of shards.

    Buffers are reused between saves, because allocating new pages takes many times longer than copying.

    Attributes:
        limit: Maximum bytes in use, or None. A single buffer may exceed it.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.used_bytes = 0
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._freed = threading.Condition()

    def take(self, size: int, *, wait: bool = True) -> np.ndarray | None:
        """Allocate `size` bytes. If the limit is reached, wait, or return None if `wait` is False."""
        with self._freed:
            while self.limit is not None and self.used_bytes and self.used_bytes + size > self.limit:
                if not wait:
                    return None
                self._freed.wait()
            self.used_bytes += size
            if self._free[size]:
                return self._free[size].pop()
            if self.limit is not None:
                self._free.clear()
        return np.empty(size, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Return a buffer to the pool."""
        with self._freed:
            self.used_bytes -= buffer.size
            self._free[buffer.size].append(buffer)
            self._freed.notify_all()

    def trim(self) -> None:
        """Free unused buffers."""
        with self._freed:
            self._free.clear()


class RateLimit:
    """Limits the total write rate, in bytes per second. None means no limit."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._free_time = 0.0
        self._lock = threading.Lock()

    def chunks(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the chunks at the limited rate."""
        for chunk in chunks:
            if self.limit is not None:
                with self._lock:
                    begin = max(time.monotonic(), self._free_time)
                    self._free_time = begin + len(chunk) / self.limit
                time.sleep(max(0.0, begin - time.monotonic()))
            yield chunk


class PartWriter:
    """Writes this process's shards of a state.

    Args:
        storage: Storage to write to.
        folder: Staging folder of the checkpoint, with a trailing `/`.
        buffers: Host memory for copies.
        pool: Threads that write the files.
        rate: Rate limit for all writers.
        single_process: If True, write a complete checkpoint from the shards on this process, including replicas.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        buffers: HostBuffers,
        pool: Executor,
        *,
        rate: RateLimit | None = None,
        single_process: bool = False,
    ):
        self.storage, self.folder, self.buffers, self.pool = storage, folder, buffers, pool
        self.rate = rate or RateLimit()
        self.process, self.shards = (
            (0, iter_local_shards) if single_process else (jax.process_index(), iter_saved_shards)
        )
        self.files: list[BinaryFile] = []
        self.described: dict[str, dict[str, Any]] = {}
        self._counts: Counter[str] = Counter()
        self._open: dict[str, BinaryFile] = {}
        self._full: list[tuple[str, BinaryFile]] = []
        self._futures: list[Future[None]] = []
        self._uses: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def copy(self, arrays: Mapping[str, jax.Array]) -> None:
        """Copy the shards to host memory. The originals may be donated after this returns.

        Writing starts after copying, so that it does not slow down the copies. If host memory is limited, the two overlap.
        """
        shards = [(path, start, data) for path, x in arrays.items() for start, data in self.shards(x)]
        if self.buffers.limit is None:
            for _, _, data in shards:
                data.copy_to_host_async()
        for path, _, _ in shards:
            x = arrays[path]
            cell = x.sharding.shard_shape(x.shape)
            self.described[path] = {"shape": list(x.shape), "dtype": str(x.dtype), "cell": list(cell)}
        copies = [self._add(path, start, np.asarray(data)) for path, start, data in shards]
        for copied in self.pool.map(lambda copy: np.copyto(*copy), (c for c in copies if c is not None)):
            assert copied is None
        self._join_small()
        self._flush()

    def _add(self, path: str, start: tuple[int, ...], data: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Reserve host memory for a shard and assign its pieces to files.

        Returns:
            The destination and source of the copy that the caller must make. None if host memory is limited, in which case
            the copy is made immediately because files are written concurrently.
        """
        buffer = self.buffers.take(data.nbytes, wait=False)
        if buffer is None:  # the memory may be held by files that are not full yet
            self._flush()
            buffer = self.buffers.take(data.nbytes)
        assert buffer is not None
        copy = buffer.view(data.dtype).reshape(data.shape)
        if self.buffers.limit is not None:
            np.copyto(copy, data)
        boxes = list(split_shape(data.shape, data.dtype.itemsize))
        self._uses[id(buffer)] = [buffer, len(boxes)]
        offset = 0
        for corner, shape in boxes:  # in C order, so the pieces are consecutive byte ranges
            size = int(np.prod(shape)) * data.dtype.itemsize
            begin = tuple(a + b for a, b in zip(start, corner, strict=True))
            self._append(Part(path, begin, tuple(shape), size, buffer.data[offset : offset + size]), id(buffer))
            offset += size
        return (copy, data) if self.buffers.limit is None else None

    def _append(self, part: Part, buffer: int) -> None:
        kind = _kind(part.path)
        if kind not in self._open:
            self._open[kind] = BinaryFile(f"{kind}{self.process}-{self._counts[kind]}.bin")
            self._counts[kind] += 1
            self.files.append(self._open[kind])
        file = self._open[kind]
        file.add(part, buffer)
        if file.bytes >= FILE:
            self._full.append((kind, self._open.pop(kind)))
            if self.buffers.limit is not None:
                self._submit()

    def _join_small(self) -> None:
        """Append each small file to another file that is not written yet, of the same kind if possible."""
        for kind in sorted(self._open):  # others before weights
            file = self._open.get(kind)
            if file is None or file.bytes >= SMALL:
                continue
            full = [f for k, f in reversed(self._full) if k == kind]
            other_kind = [f for k, f in (*self._open.items(), *self._full) if k != kind]
            for target in [*full, *other_kind][:1]:
                target.absorb(file)
                self.files.remove(self._open.pop(kind))

    def _flush(self) -> None:
        self._full += self._open.items()
        self._open.clear()
        self._submit()

    def _submit(self) -> None:
        self._futures += [self.pool.submit(self._write, file) for _, file in self._full]
        self._full.clear()

    def _write(self, file: BinaryFile) -> None:
        try:
            self.storage.write(f"{self.folder}{STATE}/{file.name}", self.rate.chunks(file.chunks()))
        finally:
            for buffer in file.release():
                self._release(buffer)

    def _release(self, buffer: int) -> None:
        with self._lock:
            use = self._uses[buffer]
            use[1] -= 1
            if use[1] == 0:
                self.buffers.give(self._uses.pop(buffer)[0])

    def finish(self) -> bytes:
        """Wait for the files. Return the index of this process; see `shards.render_index`."""
        errors = [e for f in self._futures if (e := f.exception()) is not None]
        if errors:
            raise errors[0]
        return render_index(self.described, self.files)


def _kind(path: str) -> str:
    """Return the folder of an array's file in `state/`."""
    return (WEIGHTS if is_weight(path) else NON_WEIGHTS).removeprefix(f"{STATE}/")
