"""`Run`: open a run by its path or URI to read its config, lock, checkpoints, weights, metrics, and text facts."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.checkpoint.storage import open_storage
from axlearn_core.config import Node, parse
from axlearn_core.config.types import show
from axlearn_core.contracts.experiment import get_tokenizer_config
from axlearn_core.contracts.parts import Weights
from axlearn_core.contracts.storage import ForeignCheckpoints, Storage
from axlearn_core.contracts.text import TextFacts
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError, RequestError
from axlearn_core.plugins.backends import prepare_backends
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import registry
from axlearn_core.run.metric_files import METRICS, parse_records
from axlearn_core.run.record import CONFIG, LOCK, parse_lock
from axlearn_core.run.stored_config import find_checkpoints, read_run_config

if TYPE_CHECKING:
    from axlearn_core.run.weights import RunWeights


class Run:
    """A run at a path or URI. Files are read on first access.

    `config`, `weights`, `text`, and `derive` import the components of the config, and therefore JAX. The other attributes do not.

    Attributes:
        uri: Path or URI of the run directory, or of its folder of checkpoints.
        storage: Storage of `uri`.
    """

    def __init__(self, uri: str | Path, *, storage: Storage | None = None):
        self.uri = str(uri)
        self.storage = storage or open_storage(uri)
        self._weights: dict[int | None, RunWeights | None] = {}

    def __str__(self) -> str:
        return self.uri

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Config file as plain data. Empty if it does not exist.

        Raises:
            CheckpointError: If the file cannot be parsed or is not a mapping.
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
                "    fix: restore it from the folder of a checkpoint, which has a copy"
            )
        return data

    @cached_property
    def config(self) -> Node[Any] | None:
        """Resolved config with asset paths that can be opened. None if there is no config file.

        Raises:
            CheckpointError: If the file cannot be read, or if an asset of the run is missing.
        """
        return read_run_config(self.storage, self.uri)

    @cached_property
    def lock(self) -> Mapping[str, Any]:
        """Lock: versions, devices, data, provenance, and the run's ID. Empty if it does not exist.

        Raises:
            CheckpointError: If the lock is damaged.
        """
        try:
            return parse_lock(self.storage.read(LOCK), f"{self.uri}/{LOCK}")
        except MissingFileError:
            return {}

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Folder of the run's checkpoints, which may be outside the run directory.

        Raises:
            CheckpointError: If `uri` is neither a run directory nor a folder of checkpoints.
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
        """Checkpoints in the run's folder that a different library wrote, or None if no plugin recognizes any."""
        return find_foreign(self.checkpoints)

    @cached_property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """Records of `metrics.jsonl`: `step`, values, and `elapsed_seconds`. Damaged lines are skipped."""
        try:
            return [record for _, record in parse_records(self.storage.read(METRICS), METRICS)[0]]
        except MissingFileError:
            return []

    def weights(self, step: int | None = None) -> "RunWeights":
        """Open the weights of a checkpoint, without reading tensors.

        Args:
            step: Step of the checkpoint (default: the newest).

        Raises:
            CheckpointError: If this is not a run, or if the checkpoint does not exist or is damaged.
        """
        weights = self.find_weights(step)
        if weights is None:
            raise self.missing()
        return weights

    def missing(self) -> CheckpointError:
        """Return the error for a path or URI that is not a run."""
        path = None if "://" in self.uri else Path(self.uri)
        reason = f"has no {CONFIG}"
        if path is not None and not path.is_dir():
            reason = "is a file" if path.exists() else "does not exist"
        is_step = self.uri.rstrip("/").rpartition("/")[2].isdecimal()
        above = "\n    if this is the checkpoint of one step, use its parent folder" if is_step else ""
        return CheckpointError(
            f"{self.uri} is not a run directory: it {reason}\n"
            "    fix: use the directory that `axlearn train` printed; convert a Hugging Face model to a run with\n"
            "    `axlearn checkpoint import-hf`, an Orbax checkpoint with `axlearn checkpoint import-orbax`,\n"
            f"    and adapters with `axlearn lora merge`{above}"
        )

    def find_weights(self, step: int | None = None) -> "RunWeights | None":
        """Open the weights of a checkpoint as `weights` does, but return None if this is not a run."""
        from axlearn_core.run.weights import open_run_weights

        prepare_backends()

        if step not in self._weights:
            self._weights[step] = open_run_weights(self.uri, self.storage, self.config, step)
        return self._weights[step]

    @cached_property
    def text(self) -> TextFacts | None:
        """Text facts of the model, such as its tokenizer and end tokens. None if the model has no text input.

        Raises:
            CheckpointError: If this is not a run.
            RequestError: If no installed plugin processes text.
        """
        experiment = self.weights().experiment
        if get_tokenizer_config(experiment) is None:
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
        """Write a new run with weights transformed from this run's; see `axlearn_core.run.derive.derive_run`.

        Args:
            out: New run directory.
            config: Trainer config of the new run.
            transform: Returns the tensors of the new model from the weights of this run.
            step: Step of the source checkpoint (default: the newest).
            new_step: Step of the new checkpoint (default: the step of the source).
            lock: Additional entries for the lock of the new run.
        """
        from axlearn_core.run.derive import derive_run

        weights = self.weights(step)
        facts = {"made_from": self.uri, "step": weights.step, **(lock or {})}
        return derive_run(weights, out, config, transform, new_step=new_step, extra=weights.extra, lock=facts)


def find_foreign(place: Checkpoints) -> ForeignCheckpoints | None:
    """Return the checkpoints in a folder that a different library wrote, or None if no plugin recognizes any."""
    return host().call_single("axlearn_foreign_checkpoints", storage=place.storage, folder=place.folder, uri=place.name)


def open_weights(uri: str | Path, *, step: int | None = None, storage: Storage | None = None) -> Weights:
    """Open the weights of a run, or weights in a format that a plugin supports, without reading tensors.

    Args:
        uri: A run directory or its folder of checkpoints, a Hugging Face directory, exported adapters (`DIR` or
            `DIR?base=RUN`), ...
        step: Step of a run's checkpoint (default: the newest).
        storage: Storage to read the run's files from (default: the storage of `uri`).

    Raises:
        CheckpointError: If there are no weights, if the step does not exist, or if the tensors do not match the run's model.
        RequestError: If no plugin supports the URI scheme.
    """
    prepare_backends()
    try:
        run = Run(uri, storage=storage)
        if (opened := run.find_weights(step)) is not None:
            return opened
        error: RequestError = run.missing()
    except CheckpointError:
        raise
    except RequestError as unknown:  # a plugin may still support the URI
        error = unknown
    if step is None and (weights := host().call_single("axlearn_weights", uri=str(uri))) is not None:
        return weights
    raise error
