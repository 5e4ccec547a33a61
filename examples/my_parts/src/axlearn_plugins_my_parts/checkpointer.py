"""The component `npz`."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.learn import flatten, unflatten

HASHES = "sha256.json"


class NpzCheckpointer(Configurable):
    """Writes the state of a single process as one `state.npz`, with a hash of every file. `save` blocks."""

    @node
    class Config(Configurable.Config["NpzCheckpointer"]):
        """`every_steps` saves after so many steps, and `keep_last` keeps the newest; null keeps all."""

        every_steps: int = setting(default=100, ge=1)
        keep_last: int | None = setting(default=3, ge=1)

    def __init__(self, cfg: Config, *, directory: Path):
        if jax.process_count() > 1:
            raise RequestError(
                "npz checkpoints are of one process\n"
                f"    got: {jax.process_count()} processes\n    fix: set checkpointer={type: orbax}"
            )
        self.cfg, self.storage = cfg, LocalStorage(directory)
        self.files: dict[str, str | Callable[[], str]] = {}

    def due(self, step: int) -> bool:
        """Whether `every_steps` divides the step."""
        return step > 0 and step % self.cfg.every_steps == 0

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        folders = {file.path.partition("/")[0] for file in self.storage.list()}
        return sorted(int(name) for name in folders if name.isdigit())

    def latest_step(self) -> int | None:
        """The newest complete step."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Writes beside the final place and renames. Raises `StorageError` where the disk refuses."""
        if step in self.steps():
            return False
        partial = f".{step}.partial"
        self.storage.delete(partial)
        arrays = {path: np.asarray(_plain(x)) for path, x in flatten(state).items()}
        directory = self.storage.directory() / partial
        texts = {name: text() if callable(text) else text for name, text in self.files.items()}
        types = {path: [list(x.shape), str(x.dtype)] for path, x in arrays.items()}
        texts |= {"extra.json": json.dumps(dict(extra)), "types.json": json.dumps(types)}
        for name, text in texts.items():
            self.storage.write(f"{partial}/{name}", [text.encode()])
        # As bytes: numpy has no bfloat16.
        data: dict[str, Any] = {path: np.frombuffer(x.tobytes(), np.uint8) for path, x in arrays.items()}
        np.savez(directory / "state.npz", **data)
        hashes = {file.name: _hash(file) for file in sorted(directory.iterdir())}
        self.storage.write(f"{partial}/{HASHES}", [json.dumps(hashes).encode()])
        self.storage.commit(partial, str(step))
        for old in self.steps()[: -self.cfg.keep_last] if self.cfg.keep_last else ():
            self.storage.delete(str(old))
        return True

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state, extra). Raises `CheckpointError` for a missing step, another model or a damaged file."""
        directory = self.storage.root / str(step)
        if step not in self.steps():
            raise CheckpointError(f"{directory} does not exist\n    steps: {self.steps()}")
        self._verify(directory)
        types = json.loads((directory / "types.json").read_text())
        leaves = flatten(like)
        expected = {
            path: [list(x.shape), str(x.dtype)] for path, x in flatten(jax.eval_shape(_plain_tree, like)).items()
        }
        if different := sorted(p for p in types.keys() | expected.keys() if types.get(p) != expected.get(p)):
            path = different[0]
            raise CheckpointError(
                f"{directory} is of another state: {len(different)} arrays differ, such as {path}\n"
                f"    got: {types.get(path)}\n    expected: {expected.get(path)}"
            )
        with np.load(directory / "state.npz") as data:
            arrays = {p: data[p].view(jnp.dtype(dtype)).reshape(shape) for p, (shape, dtype) in types.items()}
        placed = {path: _place(arrays[path], leaves[path]) for path in arrays}
        return unflatten(like, placed), json.loads((directory / "extra.json").read_text())

    def _verify(self, directory: Path) -> None:
        try:
            hashes = json.loads((directory / HASHES).read_text())
        except ValueError as error:
            raise CheckpointError(f"{directory / HASHES} is damaged: {error}") from error
        damaged = [name for name, known in hashes.items() if known != _hash(directory / name)]
        if damaged or {p.name for p in directory.iterdir()} != {*hashes, HASHES}:
            raise CheckpointError(f"{directory} is damaged: {', '.join(damaged) or 'a file is missing'}")

    def wait(self) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Holds nothing."""


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _plain_tree(tree: Any) -> Any:
    return jax.tree.map(_plain, tree)


def _place(array: np.ndarray, like: Any) -> jax.Array:
    """The array on the devices of `like`, as random keys where it has some."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.wrap_key_data(jnp.asarray(array)), like.sharding)
    return jax.device_put(array, like.sharding)


def _hash(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
