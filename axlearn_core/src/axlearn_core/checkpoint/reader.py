"""Read the arrays of a checkpoint."""

from collections.abc import Collection, Mapping

import jax
from jax.sharding import Sharding

from axlearn_core.checkpoint import stream
from axlearn_core.checkpoint.manifest import STATE, Checkpoints, Manifest
from axlearn_core.checkpoint.shards import Box, DamagedError
from axlearn_core.checkpoint.state import agree
from axlearn_core.errors import CheckpointError


class CheckpointReader:
    """Reads the arrays of one checkpoint.

    Args:
        place: Folder of checkpoints.
        manifest: Manifest of the checkpoint.
    """

    def __init__(self, place: Checkpoints, manifest: Manifest):
        self.place, self.manifest = place, manifest
        self._root = f"{place.folder}{manifest.step}/"
        self._index = stream.ArrayIndex(place.storage, self._root, manifest)

    def read(self, shardings: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        """Read arrays. Each process reads and verifies the pieces that it needs. All processes must call this together.

        Args:
            shardings: Sharding of each array by its path in the manifest. None means the default device.

        Raises:
            CheckpointError: If a file is damaged on any process.
        """
        error: CheckpointError | None = None
        loaded: dict[str, jax.Array] = {}
        paths = {path: self.manifest.arrays[path].path for path in shardings}
        try:
            index = self._index.find({paths[p]: self._boxes(p, shardings[p]) for p in shardings})
            arrays = {path: index[stored] for path, stored in paths.items() if stored in index}
            places = {path: shardings[path] for path in arrays}
            loaded = dict(stream.read_arrays(self.place.storage, f"{self._root}{STATE}/", arrays, places))
        except DamagedError as damage:
            error = self.place.damaged(self.manifest.step, [str(damage)])
        agree(error, error)
        return loaded

    def _boxes(self, path: str, sharding: Sharding | None) -> Collection[Box]:
        """Return the boxes of an array that this process reads. Empty in format 3, in which all indices are read."""
        index = self.manifest.index
        stored = index.arrays.get(self.manifest.arrays[path].path) if index is not None else None
        return () if stored is None else set(stream.local_boxes(sharding, stored.shape).values())
