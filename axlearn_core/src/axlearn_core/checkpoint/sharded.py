"""The default checkpointer. It saves asynchronously and atomically, and hashes files while it writes them.

The `manifest` module documents the file layout.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint.base import StorageCheckpointer
from axlearn_core.checkpoint.manifest import NON_WEIGHTS, Index, Manifest
from axlearn_core.checkpoint.part_indices import PartIndices
from axlearn_core.checkpoint.piece_index import FOLDER, write_index
from axlearn_core.checkpoint.reader import CheckpointReader
from axlearn_core.checkpoint.writer import HostBuffers, PartWriter, RateLimit
from axlearn_core.config import node, setting


class ShardedCheckpointer(StorageCheckpointer):
    """The default checkpointer. Every process hashes and writes its own shards."""

    layout_file = f"{FOLDER}0.bin"

    @node
    class Config(StorageCheckpointer.Config):
        """Limits, in addition to the fields of `StorageCheckpointer`.

        Attributes:
            max_host_bytes: Maximum host memory for copies of a process's shards, or the size of the largest shard if that is
                larger. `save` waits for free memory. None means no limit.
            max_bytes_per_second: Maximum write rate of each process. None means no limit.
            max_saves_in_flight: Maximum number of concurrent saves. Any further save waits for the oldest one to finish.
        """

        max_host_bytes: int | None = setting(default=None, ge=1, hide_default=True)
        max_bytes_per_second: int | None = setting(default=None, ge=1, hide_default=True)
        max_saves_in_flight: int = setting(default=1, ge=1, hide_default=True)

    def __init__(self, cfg: Config, *, directory: Path | str):
        super().__init__(cfg, directory=directory)
        self.max_saves_in_flight = cfg.max_saves_in_flight
        self._buffers = HostBuffers(cfg.max_host_bytes)
        self._writers = ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), thread_name_prefix="checkpoint-files")
        self._rate = RateLimit(cfg.max_bytes_per_second)
        self._indices: dict[str, PartIndices] = {}

    def close(self) -> None:
        """Wait for all saves, then stop the threads."""
        try:
            super().close()
        finally:
            self._writers.shutdown()
            self._buffers.trim()

    def _copy(self, step: int, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
        folder = f"{self._staging(step)}/"
        writer = PartWriter(self.place.storage, folder, self._buffers, self._writers, rate=self._rate)
        indices = PartIndices()
        if jax.process_index() == 0:
            self._indices[folder] = indices
        writer.copy(arrays)

        def write() -> None:
            try:
                part = writer.finish()
            except BaseException as error:
                indices.fail(error)
                raise
            indices.send(part)

        return write

    def _collect_files(self, folder: str) -> tuple[dict[str, dict[str, Any]], Index | None]:
        indices = self._indices.pop(folder)
        try:
            return {}, write_index(self.place.storage, folder, indices.collect())
        finally:
            indices.clear()

    def _discard(self, folder: str) -> None:
        if (indices := self._indices.pop(f"{folder}/", None)) is not None:
            indices.clear()
        super()._discard(folder)

    def _has_layout(self, checkpoint: Manifest) -> bool:
        return checkpoint.index is not None or f"{NON_WEIGHTS}0.json" in checkpoint.files

    def reader(self, checkpoint: Manifest) -> CheckpointReader:
        """See `StorageCheckpointer.reader`."""
        return CheckpointReader(self.place, checkpoint)
