"""Read the arrays of a checkpoint."""

from collections.abc import Mapping

import jax
from jax.sharding import Sharding

from axlearn_core.checkpoint import stream
from axlearn_core.checkpoint.manifest import NON_WEIGHTS, WEIGHTS, Checkpoints, Manifest
from axlearn_core.checkpoint.shards import StoredArray
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
        self._indices: dict[str, dict[str, StoredArray]] = {}

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
            for folder in (WEIGHTS, NON_WEIGHTS):
                if missing := [path for path in shardings if path not in loaded]:
                    index = self._index(folder)
                    arrays = {path: index[paths[path]] for path in missing if paths[path] in index}
                    places = {path: shardings[path] for path in arrays}
                    loaded |= dict(stream.read_arrays(self.place.storage, self._root + folder, arrays, places))
        except stream.DamagedError as damage:
            error = self.place.damaged(self.manifest.step, [str(damage)])
        agree(error, error)
        return loaded

    def _index(self, folder: str) -> dict[str, StoredArray]:
        if folder not in self._indices:
            files = self.manifest.files
            self._indices[folder] = stream.read_index(self.place.storage, self._root, files, folder)
        return self._indices[folder]
