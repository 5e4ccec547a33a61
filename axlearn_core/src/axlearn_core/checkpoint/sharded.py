"""The default checkpointer. It saves asynchronously and atomically, and hashes files while it writes them.

The `manifest` module documents the file layout.
"""

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
    """The default checkpointer. Every process hashes and writes its own shards."""

    layout_file = f"{manifest.NON_WEIGHTS}0.json"

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
        writer.copy(arrays)
        return writer.finish

    def _collect_files(self, folder: str) -> dict[str, dict[str, Any]]:
        return collect_parts(self.place.storage, folder, jax.process_count())

    def reader(self, checkpoint: Manifest) -> CheckpointReader:
        """See `StorageCheckpointer.reader`."""
        return CheckpointReader(self.place, checkpoint)
