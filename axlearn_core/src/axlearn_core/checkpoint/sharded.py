"""Checkpoints over a storage: asynchronous, atomic, hashed while they are written. The layout is in `manifest`."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint import manifest
from axlearn_core.checkpoint.base import StorageCheckpointer
from axlearn_core.checkpoint.manifest import Manifest
from axlearn_core.checkpoint.reader import CheckpointReader
from axlearn_core.checkpoint.writer import HostBuffers, PartWriter, RateLimit, collect_parts
from axlearn_core.config import node, setting


class ShardedCheckpointer(StorageCheckpointer):
    """The shipped checkpointer. Every process writes and hashes its own shards."""

    layout_file = f"{manifest.OTHERS}0.json"

    @node
    class Config(StorageCheckpointer.Config):
        """The fields of `StorageCheckpointer`, and limits.

        Attributes:
            max_host_bytes: host memory for copies of one process's shards, or the largest shard if that is more. `save`
                waits for room. None copies everything at once.
            max_bytes_per_second: of each process, on the way to the storage. None writes as fast as it can.
            max_saves_in_flight: how many saves may be under way; one more waits for the oldest.
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

    def close(self) -> None:
        """Waits, then ends the threads."""
        try:
            super().close()
        finally:
            self._writers.shutdown()
            self._buffers.trim()

    def _copy(self, step: int, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
        folder = f"{self._staging(step)}/"
        writer = PartWriter(self.place.storage, folder, self._buffers, self._writers, rate=self._rate)
        writer.copy(arrays)
        return writer.finish

    def _collect_files(self, folder: str) -> dict[str, dict[str, Any]]:
        return collect_parts(self.place.storage, folder, jax.process_count())

    def reader(self, checkpoint: Manifest) -> CheckpointReader:
        """See `StorageCheckpointer.reader`."""
        return CheckpointReader(self.place, checkpoint)
