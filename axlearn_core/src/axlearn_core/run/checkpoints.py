"""The checkpoint of a run, read through a storage: its config, its manifest, and some of its arrays."""

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
from axlearn_core.contracts.experiment import checkpointer_of, input_of
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError
from axlearn_core.learn.paths import flatten
from axlearn_core.plugins.unregistered import code_name
from axlearn_core.run.asset_copies import Place, aligned_assets
from axlearn_core.run.record import CONFIG
from axlearn_core.run.stored_config import CHECKPOINTS, find_checkpoints, read_run_config

log = logging.getLogger(__name__)


class RunCheckpoint:
    """One checkpoint of a run.

    Attributes:
        uri: of the run.
        config: the run's root config.
        place: where its checkpoints lie.
        step: of the checkpoint.
        manifest: what the checkpoint holds.
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
        """Dotted path in the training state -> shape and dtype."""
        return self.manifest.arrays

    def migrate(self, expected: Collection[str]) -> None:
        """Gives arrays that are wanted and missing the paths of this version, where an earlier version had others."""
        self.manifest = self.manifest.migrated(expected)
        self.__dict__.pop("_reader", None)

    @cached_property
    def _reader(self) -> ArrayReader:
        return CheckpointReader(self.place, self.manifest) if self._other is None else self._other.reader(self.manifest)

    @property
    def weights_only(self) -> bool:
        """Whether it has no training state, as after an import."""
        return bool(self.extra.get(WEIGHTS_ONLY))

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Everything but the arrays, such as the position in the data."""
        return (self._other or self.place).read_extra(self.step)

    def read(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The arrays of `like`, by their paths in the training state, in its shardings (None: the default device).

        Only the pieces that this process needs are read, and each is checked.

        Raises:
            CheckpointError: a file is damaged.
        """
        return self._reader.read({path: spec.sharding for path, spec in like.items()}) if like else {}


def _open_other(cfg: StorageCheckpointer.Config, place: Checkpoints) -> StorageCheckpointer | None:
    """Opens the checkpointer that knows how arrays are stored; None for those of the core, which store them in shards."""
    if isinstance(cfg, ShardedCheckpointer.Config):
        return None
    return attrs.evolve(cfg, uri=None).build(directory=place.name)


class WholeCheckpoint:
    """One checkpoint of a run whose checkpointer knows only whole states; see `RunCheckpoint`.

    The first `read` restores the state, onto the default device, and keeps its weights.
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
        """Nothing: what the checkpointer restores has the paths of this version."""

    @property
    def extra(self) -> dict[str, Any]:
        """Everything but the arrays, such as the position in the data."""
        return self._restore_arrays[1]

    def read(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The arrays of `like`, in its shardings (None: the default device)."""
        return {p: jax.device_put(self._restore_arrays[0][p], x.sharding) for p, x in like.items()}

    @cached_property
    def _restore_arrays(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        with self._checkpointer() as checkpointer:
            state, extra = checkpointer.restore(self.step, self._abstract)
        return flatten(state), extra

    @cached_property
    def _abstract(self) -> TrainState:
        model = ModelAndObjective.of(self.config)
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
    """The step to open: `step`, or else the newest. Raises `CheckpointError` if it is not one of `steps`."""
    if not steps:
        raise CheckpointError(
            f"{uri} has no checkpoint\n"
            "    fix: train the run until it saves one; for the folder of one checkpoint, give its run directory and the step"
        )
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise CheckpointError(f"{uri} has no checkpoint of step {step} (there: {listed})\n    fix: give one of those")
    return steps[-1] if step is None else step


def open_folder(uri: str | Path, storage: Storage, step: int | None = None) -> RunCheckpoint | None:
    """A checkpoint where `uri` is the folder of checkpoints itself, with the config inside it; None where it is not."""
    place = Checkpoints(storage, str(uri))
    if not (steps := place.steps()):
        return None
    resolved_step = find_step(uri, steps, step)
    places: list[Place] = [(storage, ""), *_above(uri)]
    config = read_run_config(storage, uri, f"{resolved_step}/{CONFIG}", places=places)
    if config is None:
        raise CheckpointError(
            f"the checkpoint of step {resolved_step} in {uri} has no {CONFIG}\n    fix: give the run directory"
        )
    return RunCheckpoint(uri, place, config, resolved_step)


def _above(uri: str | Path) -> list[Place]:
    """The run directory of its folder of checkpoints; empty if `uri` is a folder of another name."""
    run, _, name = str(uri).rstrip("/").rpartition("/")
    return [(open_storage(run or "."), "")] if name == CHECKPOINTS else []


def open_checkpoint(
    uri: str | Path, storage: Storage, config: object, step: int | None = None
) -> RunCheckpoint | WholeCheckpoint:
    """A checkpoint of a run, by default the newest, as the run's checkpointer keeps it.

    Raises:
        CheckpointError: the config is not a trainer's, no such step, or a damaged manifest.
    """
    checkpointer = checkpointer_of(config)
    if checkpointer is None:
        raise CheckpointError(f"{uri}/{CONFIG} is not a trainer's config: it has no checkpointer")
    if isinstance(checkpointer, StorageCheckpointer.Config):
        checkpoint = RunCheckpoint(uri, find_checkpoints(uri, storage, checkpointer.uri), config, step)
        checkpoint.config = _trained_config(checkpoint, storage, config)
        return checkpoint
    return WholeCheckpoint(uri, config, step)


def _trained_config(checkpoint: RunCheckpoint, storage: Storage, config: object) -> Any:
    """The config inside a checkpoint, which is hashed with it: that of the run may have been edited since.

    Only the input is the run's: the run may read its data elsewhere now. Differences are logged.
    """
    if CONFIG not in checkpoint.manifest.files:
        return config  # an earlier version wrote it
    place, path = checkpoint.place, f"{checkpoint.place.folder}{checkpoint.step}/{CONFIG}"
    text = place.storage.read(path)
    if manifest.describe(text) != {k: checkpoint.manifest.files[CONFIG].get(k) for k in ("bytes", "sha256")}:
        raise place.damaged(checkpoint.step, [f"{CONFIG}: its hash does not match"])
    if storage.read(CONFIG) == text:
        return config
    places: list[Place] = [(place.storage, place.folder), (storage, "")]
    trained: Any = read_run_config(place.storage, place.name, path, places=places)
    changes = diff(aligned_assets(trained, config), config, code_name)
    edited = [change for change, kind in change_kinds(changes, trained, config) if kind in DECISIVE]
    if edited:
        lines = [
            f"    {c.path}: {c.old!r} in the checkpoint, {c.new!r} there"
            + ("" if c.path.startswith("input.") else "; the checkpoint decides")
            for c in edited[:12]
        ]
        more = [f"    and {len(edited) - 12} more"] if len(edited) > 12 else []
        head = f"{checkpoint.uri}/{CONFIG} is not the config that step {checkpoint.step} was trained with"
        log.warning("%s", "\n".join([head, *lines, *more]))
    own = input_of(config)
    return trained if own is None else attrs.evolve(trained, input=own)
