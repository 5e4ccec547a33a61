"""A run, opened by its path or URI: its config, lock, checkpoints, weights, metrics and text."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.checkpoint.storage import open_storage
from axlearn_core.config import Node, parse
from axlearn_core.config.types import show
from axlearn_core.contracts.experiment import tokenizer_of_input
from axlearn_core.contracts.parts import Weights
from axlearn_core.contracts.storage import ForeignCheckpoints, Storage
from axlearn_core.contracts.text import TextFacts
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError, RequestError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import registry
from axlearn_core.run.metric_files import METRICS, parse_records
from axlearn_core.run.record import CONFIG, LOCK, parse_lock
from axlearn_core.run.stored_config import find_checkpoints, read_run_config

if TYPE_CHECKING:
    from axlearn_core.run.weights import RunWeights


class Run:
    """A run at a path, or at the URI of a storage. Nothing is read before it is asked for.

    `config`, `weights`, `text` and `derive` import what the config names, and JAX with it; the rest does not.

    Attributes:
        uri: of the run directory, or of its folder of checkpoints.
        storage: of `uri`.
    """

    def __init__(self, uri: str | Path, *, storage: Storage | None = None):
        self.uri = str(uri)
        self.storage = storage or open_storage(uri)
        self._weights: dict[int | None, RunWeights | None] = {}

    def __str__(self) -> str:
        return self.uri

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The config file as plain data; empty if there is none.

        Raises:
            CheckpointError: the file cannot be parsed, or has no settings.
        """
        try:
            text = self.storage.read(CONFIG).decode()
            data = parse(text, f"{self.uri}/{CONFIG}").data
        except MissingFileError:
            return {}
        except (ConfigError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.uri}/{CONFIG} cannot be read: {error}") from error
        if not isinstance(data, Mapping):
            raise CheckpointError(
                f"{self.uri}/{CONFIG} is damaged\n    got: {show(data)}\n    expected: a mapping\n"
                "    fix: bring it back from the folder of a checkpoint, which has a copy"
            )
        return data

    @cached_property
    def config(self) -> Node[Any] | None:
        """The resolved config; None if there is no config file. Paths of assets can be opened.

        Raises:
            CheckpointError: the file cannot be read back, or the run lacks an asset.
        """
        return read_run_config(self.storage, self.uri)

    @cached_property
    def lock(self) -> Mapping[str, Any]:
        """Versions, devices, data, provenance, the run's id; empty if there is no lock.

        Raises:
            CheckpointError: the lock is damaged.
        """
        try:
            return parse_lock(self.storage.read(LOCK), f"{self.uri}/{LOCK}")
        except MissingFileError:
            return {}

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The folder of the run's checkpoints, wherever its config keeps it.

        Raises:
            CheckpointError: `uri` is neither a run directory nor a folder of checkpoints.
        """
        if not self.settings:
            place = Checkpoints(self.storage, self.uri)
            if place.steps() or find_foreign(place) is not None:
                return place
            raise self.missing()
        checkpointer = self.settings.get("checkpointer")
        return find_checkpoints(
            self.uri, self.storage, checkpointer.get("uri") if isinstance(checkpointer, Mapping) else None
        )

    @cached_property
    def foreign_checkpoints(self) -> ForeignCheckpoints | None:
        """The checkpoints that another library wrote beside the run's; None if there are none, or no plugin knows them."""
        return find_foreign(self.checkpoints)

    @cached_property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The records of `metrics.jsonl`: `step`, the values, `elapsed_seconds`. Damaged lines are left out."""
        try:
            return [record for _, record in parse_records(self.storage.read(METRICS), METRICS)[0]]
        except MissingFileError:
            return []

    def weights(self, step: int | None = None) -> "RunWeights":
        """The weights of a checkpoint. Reads no tensor.

        Args:
            step: of the checkpoint; by default the newest.

        Raises:
            CheckpointError: this is not a run, there is no such checkpoint, or the checkpoint is damaged.
        """
        weights = self.find_weights(step)
        if weights is None:
            raise self.missing()
        return weights

    def missing(self) -> CheckpointError:
        """The error for a path or URI that is not a run."""
        path = None if "://" in self.uri else Path(self.uri)
        reason = f"has no {CONFIG}"
        if path is not None and not path.is_dir():
            reason = "is a file" if path.exists() else "does not exist"
        is_step = self.uri.rstrip("/").rpartition("/")[2].isdecimal()
        above = "\n    if this is the checkpoint of one step, give the folder above it" if is_step else ""
        return CheckpointError(
            f"{self.uri} is not a run directory: it {reason}\n"
            "    fix: give the directory that `axlearn train` named; a Hugging Face model becomes a run with\n"
            "    `axlearn checkpoint import-hf`, an Orbax checkpoint with `axlearn checkpoint import-orbax`,\n"
            f"    adapters with their base with `axlearn lora merge`{above}"
        )

    def find_weights(self, step: int | None = None) -> "RunWeights | None":
        """As `weights`; None if there is no run."""
        from axlearn_core.run.weights import open_run_weights

        if step not in self._weights:
            self._weights[step] = open_run_weights(self.uri, self.storage, self.config, step)
        return self._weights[step]

    @cached_property
    def text(self) -> TextFacts | None:
        """How the model's text becomes tokens, and what ends an output; None if the model has no text.

        Raises:
            CheckpointError: this is not a run.
            RequestError: no installed package processes text.
        """
        experiment = self.weights().experiment
        if tokenizer_of_input(experiment) is None:
            return None
        return registry().entry("functions", "text_processor").load()(experiment)

    def derive(
        self,
        out: str | Path,
        config: Node[Any],
        transform: "Callable[[RunWeights], Mapping[str, Any]]",
        *,
        step: int | None = None,
        new_step: int | None = None,
        lock: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes a run with weights made of this run's; see `axlearn_core.run.derive.derive_run`.

        Args:
            out: the new run directory.
            config: of the new run's trainer.
            transform: from this run's weights to the tensors of the new model.
            step: the checkpoint to take; by default the newest.
            new_step: the step of the new run's checkpoint; by default that of the checkpoint.
            lock: more for the lock of the new run.
        """
        from axlearn_core.run.derive import derive_run

        weights = self.weights(step)
        facts = {"made_from": self.uri, "step": weights.step, **(lock or {})}
        return derive_run(weights, out, config, transform, new_step=new_step, extra=weights.extra, lock=facts)


def find_foreign(place: Checkpoints) -> ForeignCheckpoints | None:
    """The checkpoints in a folder that another library wrote, if an installed plugin finds some."""
    return host().only("axlearn_foreign_checkpoints", storage=place.storage, folder=place.folder, uri=place.name)


def open_weights(uri: str | Path, *, step: int | None = None, storage: Storage | None = None) -> Weights:
    """The weights at a path or URI: of a run, or of anything that an installed plugin knows. Reads no tensor.

    Args:
        uri: a run directory or its folder of checkpoints, a directory in Hugging Face format, exported adapters (`DIR` or
            `DIR?base=RUN`), ...
        step: which checkpoint of a run; by default the newest.
        storage: what the run's files are read from; by default the storage of `uri`.

    Raises:
        CheckpointError: no weights there, no such step, or the tensors are not those of the run's model.
        RequestError: no plugin knows the scheme.
    """
    try:
        run = Run(uri, storage=storage)
        if (opened := run.find_weights(step)) is not None:
            return opened
        error: RequestError = run.missing()
    except CheckpointError:
        raise
    except RequestError as unknown:  # a plugin may know the scheme all the same
        error = unknown
    if step is None and (weights := host().only("axlearn_weights", uri=str(uri))) is not None:
        return weights
    raise error
