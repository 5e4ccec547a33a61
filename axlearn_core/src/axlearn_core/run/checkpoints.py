"""Open a checkpoint of a run: its config, its manifest, and selected arrays."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from axlearn_core.checkpoint import manifest
from axlearn_core.checkpoint.base import WEIGHTS_ONLY, ArrayReader, StorageCheckpointer
from axlearn_core.checkpoint.manifest import ArrayInfo, Checkpoints
from axlearn_core.checkpoint.reader import CheckpointReader
from axlearn_core.checkpoint.sharded import ShardedCheckpointer
from axlearn_core.checkpoint.storage import open_storage
from axlearn_core.compose import ModelAndObjective, TrainState
from axlearn_core.config import diff
from axlearn_core.config.kinds import DECISIVE, change_kinds
from axlearn_core.contracts.experiment import get_checkpointer_config, get_input_config
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError
from axlearn_core.learn.paths import flatten
from axlearn_core.plugins.code_names import code_name
from axlearn_core.run.asset_copies import Place, align_assets
from axlearn_core.run.record import CONFIG
from axlearn_core.run.stored_config import CHECKPOINTS, find_checkpoints, read_run_config

log = logging.getLogger(__name__)


class RunCheckpoint:
    """A checkpoint of a run.

    Attributes:
        uri: Path or URI of the run.
        config: Root config of the run.
        place: Location of its checkpoints.
        step: Step of the checkpoint.
        manifest: Manifest of the checkpoint.
    """

    def __init__(self, uri: str | Path, place: Checkpoints, config: Any, step: int | None = None):
        self.uri, self.config = uri, config
        self._other = _open_other(config.checkpointer, place)
        self.place = place if self._other is None else self._other.place
        source = self._other or place
        self.step = find_step(uri, source.steps(), step)
        self.manifest = source.inspect(self.step)

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} of {self.uri}"

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Shape and dtype of each array by dotted path in the training state."""
        return self.manifest.arrays

    def migrate(self, expected: Collection[str]) -> None:
        """If expected arrays are missing, rename arrays from earlier versions to their current paths."""
        self.manifest = self.manifest.migrated(expected)
        self.__dict__.pop("_reader", None)

    @cached_property
    def _reader(self) -> ArrayReader:
        return CheckpointReader(self.place, self.manifest) if self._other is None else self._other.reader(self.manifest)

    @property
    def weights_only(self) -> bool:
        """True if the checkpoint has no training state, for example after an import."""
        return bool(self.extra.get(WEIGHTS_ONLY))

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Data other than arrays, such as the position in the input."""
        return (self._other or self.place).read_extra(self.step)

    def read(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read arrays. Only the pieces that this process needs are read and verified.

        Args:
            like: Abstract arrays keyed by path in the training state. A sharding of None means the default device.

        Raises:
            CheckpointError: If a file is damaged.
        """
        return self._reader.read({path: spec.sharding for path, spec in like.items()}) if like else {}


def _open_other(cfg: StorageCheckpointer.Config, place: Checkpoints) -> StorageCheckpointer | None:
    """Build the checkpointer that reads the arrays. Return None for the default checkpointer."""
    if isinstance(cfg, ShardedCheckpointer.Config):
        return None
    return attrs.evolve(cfg, uri=None).build(directory=place.name)


class CompleteCheckpoint:
    """A checkpoint of a run whose checkpointer can only restore complete states; see `RunCheckpoint`.

    The first `read` restores the state to the default device and caches it.
    """

    weights_only = False

    def __init__(self, uri: str | Path, config: Any, step: int | None = None):
        self.uri, self.config = uri, config
        with self._checkpointer() as checkpointer:
            self.step = find_step(uri, checkpointer.steps(), step)
        self.arrays: Mapping[str, Any] = flatten(self._abstract)

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} of {self.uri}"

    def migrate(self, expected: Collection[str]) -> None:
        """Do nothing, because the restored state already has the current paths."""

    @property
    def extra(self) -> dict[str, Any]:
        """Data other than arrays, such as the position in the input."""
        return self._restore_arrays[1]

    def read(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read arrays. A sharding of None means the default device."""
        return {p: jax.device_put(self._restore_arrays[0][p], x.sharding) for p, x in like.items()}

    @cached_property
    def _restore_arrays(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        with self._checkpointer() as checkpointer:
            state, extra = checkpointer.restore(self.step, self._abstract)
        return flatten(state), extra

    @cached_property
    def _abstract(self) -> TrainState:
        model = ModelAndObjective.from_config(self.config)
        learner = self.config.learner.build(max_steps=self.config.max_steps, axes=model.axes)
        state = jax.eval_shape(
            lambda params: TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                variables=dict(model.variables),
                rng=jax.random.key_data(jax.random.key(0)),
                learner=learner.init(params),
            ),
            model.abstract,
        )
        place = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)

    @contextmanager
    def _checkpointer(self) -> Iterator[Any]:
        checkpointer = self.config.checkpointer.build(directory=Path(self.uri) / CHECKPOINTS)
        try:
            yield checkpointer
        finally:
            checkpointer.close()


def find_step(uri: str | Path, steps: Sequence[int], step: int | None) -> int:
    """Return the step to open (default: the newest). Raise `CheckpointError` if it is not one of `steps`."""
    if not steps:
        raise CheckpointError(
            f"{uri} has no checkpoint\n"
            "    fix: train the run until it saves one; if this is the folder of one checkpoint, use its run directory and step"
        )
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise CheckpointError(f"{uri} has no checkpoint of step {step}\n    steps: {listed}\n    fix: use one of these")
    return steps[-1] if step is None else step


def open_folder(uri: str | Path, storage: Storage, step: int | None = None) -> RunCheckpoint | None:
    """Open a checkpoint if `uri` is a checkpoints folder, using the config inside the checkpoint. Otherwise, return None."""
    place = Checkpoints(storage, str(uri))
    if not (steps := place.steps()):
        return None
    resolved_step = find_step(uri, steps, step)
    places: list[Place] = [(storage, ""), *_find_run_directory(uri)]
    config = read_run_config(storage, uri, f"{resolved_step}/{CONFIG}", places=places)
    if config is None:
        raise CheckpointError(
            f"the checkpoint of step {resolved_step} in {uri} has no {CONFIG}\n    fix: use the run directory"
        )
    return RunCheckpoint(uri, place, config, resolved_step)


def _find_run_directory(uri: str | Path) -> list[Place]:
    """Return the run directory that contains the checkpoints folder `uri`. Empty if the folder has a different name."""
    run, _, name = str(uri).rstrip("/").rpartition("/")
    return [(open_storage(run or "."), "")] if name == CHECKPOINTS else []


def open_checkpoint(
    uri: str | Path, storage: Storage, config: object, step: int | None = None
) -> RunCheckpoint | CompleteCheckpoint:
    """Open a checkpoint of a run (default: the newest).

    Raises:
        CheckpointError: If the config is not a trainer config, if the step does not exist, or if the manifest is damaged.
    """
    checkpointer = get_checkpointer_config(config)
    if checkpointer is None:
        raise CheckpointError(f"{uri}/{CONFIG} is not a trainer config: it has no checkpointer")
    if isinstance(checkpointer, StorageCheckpointer.Config):
        checkpoint = RunCheckpoint(uri, find_checkpoints(uri, storage, checkpointer.uri), config, step)
        checkpoint.config = _trained_config(checkpoint, storage, config)
        return checkpoint
    return CompleteCheckpoint(uri, config, step)


def _trained_config(checkpoint: RunCheckpoint, storage: Storage, config: object) -> Any:
    """Return the config stored in a checkpoint, because the config of the run may have been edited since.

    The input is taken from the run, since its data may have moved. Differences are logged.
    """
    if CONFIG not in checkpoint.manifest.files:
        return config  # written by an earlier version
    place, path = checkpoint.place, f"{checkpoint.place.folder}{checkpoint.step}/{CONFIG}"
    text = place.storage.read(path)
    if manifest.describe(text) != {k: checkpoint.manifest.files[CONFIG].get(k) for k in ("bytes", "sha256")}:
        raise place.damaged(checkpoint.step, [f"{CONFIG}: its hash does not match"])
    if storage.read(CONFIG) == text:
        return config
    places: list[Place] = [(place.storage, place.folder), (storage, "")]
    trained: Any = read_run_config(place.storage, place.name, path, places=places)
    changes = diff(align_assets(trained, config), config, code_name)
    edited = [change for change, kind in change_kinds(changes, trained, config) if kind in DECISIVE]
    if edited:
        lines = [
            f"    {c.path}: {c.old!r} in the checkpoint, {c.new!r} in the file"
            + ("" if c.path.startswith("input.") else "; using the value in the checkpoint")
            for c in edited[:12]
        ]
        more = [f"    and {len(edited) - 12} more"] if len(edited) > 12 else []
        head = f"{checkpoint.uri}/{CONFIG} differs from the config that step {checkpoint.step} was trained with"
        log.warning("%s", "\n".join([head, *lines, *more]))
    source = get_input_config(config)
    return trained if source is None else attrs.evolve(trained, input=source)
