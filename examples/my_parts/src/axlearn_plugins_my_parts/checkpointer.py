"""The `msgpack` component."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize

from axlearn_core.extend import (
    CheckpointError,
    Configurable,
    LocalStorage,
    RequestError,
    StorageError,
    flatten,
    node,
    setting,
    unflatten,
)


class MsgpackCheckpointer(Configurable):
    """Writes the state of a single process to `state.msgpack`, with hashes of all files.

    `save` blocks until the files are written.
    """

    @node
    class Config(Configurable.Config["MsgpackCheckpointer"]):
        """Settings for `MsgpackCheckpointer`. It keeps all checkpoints.

        Attributes:
            every_steps: Number of steps between saves.
        """

        every_steps: int = setting(default=100, ge=1)

    def __init__(self, cfg: Config, *, directory: Path):
        if jax.process_count() > 1:
            raise RequestError(
                f"msgpack checkpoints support one process, got {jax.process_count()}\n    fix: use sharded"
            )
        self.cfg, self.storage, self.files = cfg, LocalStorage(directory), {}

    def due(self, step: int) -> bool:
        """Return whether to save after this step."""
        return step > 0 and step % self.cfg.every_steps == 0

    def steps(self) -> list[int]:
        """Return all complete steps, oldest first."""
        folders = {file.path.partition("/")[0] for file in self.storage.list()}
        return sorted(int(name) for name in folders if name.isdigit())

    def latest_step(self) -> int | None:
        """Return the newest complete step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Save a checkpoint in a temporary folder and rename the folder.

        Returns:
            False if the step is already saved.

        Raises:
            StorageError: If the files cannot be written.
        """
        if step in self.steps():
            return False
        self.storage.delete("partial")
        files = {name: (text() if callable(text) else text).encode() for name, text in self.files.items()}
        files["state.msgpack"] = msgpack_serialize({path: np.asarray(x) for path, x in flatten(state).items()})
        files["extra.json"] = json.dumps(dict(extra)).encode()
        files["sha256.json"] = json.dumps({name: _hash(data) for name, data in files.items()}).encode()
        for name, data in files.items():
            self.storage.write(f"partial/{name}", [data])
        self.storage.commit("partial", str(step))
        return True

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Return the state and the extra values of a checkpoint.

        Args:
            step: Step of the checkpoint.
            like: State with the expected structure, shapes, dtypes and shardings.

        Raises:
            CheckpointError: If the step is missing, a file is damaged, or the checkpoint has a different structure.
        """
        location = f"checkpoint {step} in {self.storage.root}"
        try:
            hashes = json.loads(self.storage.read(f"{step}/sha256.json"))
            files = {name: self.storage.read(f"{step}/{name}") for name in hashes}
        except (StorageError, ValueError) as error:
            raise CheckpointError(f"{location} is missing or damaged: {error}\n    steps: {self.steps()}") from error
        if damaged := [name for name, data in files.items() if _hash(data) != hashes[name]]:
            raise CheckpointError(f"{location} is damaged: {', '.join(damaged)}")
        leaves, arrays = flatten(like), msgpack_restore(files["state.msgpack"])
        expected, got = ({p: f"{x.dtype}{list(x.shape)}" for p, x in tree.items()} for tree in (leaves, arrays))
        if differing := sorted(p for p in expected.keys() | got.keys() if expected.get(p) != got.get(p)):
            first = f"got: {got.get(differing[0])}\n    expected: {expected.get(differing[0])}"
            raise CheckpointError(f"{location} has a different structure: {', '.join(differing[:3])}\n    {first}")
        placed = {path: jax.device_put(x, leaves[path].sharding) for path, x in arrays.items()}
        return unflatten(like, placed), json.loads(files["extra.json"])

    def wait(self) -> None:
        """Do nothing, because `save` blocks."""

    def close(self) -> None:
        """Do nothing."""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
