"""Read the weights of a run without its optimizer state."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Sharding

from axlearn_core.compose import Functional, ModelAndObjective
from axlearn_core.compose.objective import PREFIX
from axlearn_core.config import Node
from axlearn_core.contracts.experiment import build_tokenizer
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, RequestError, nearest
from axlearn_core.learn.evaluation import Source, evaluation_sources
from axlearn_core.learn.paths import select
from axlearn_core.run.checkpoints import CompleteCheckpoint, RunCheckpoint, open_checkpoint, open_folder


def open_run_weights(uri: str, storage: Storage, config: Node[Any] | None, step: int | None) -> "RunWeights | None":
    """Open the weights of a run, given the run or its checkpoints folder. Return None for anything else. See `Run.weights`.

    Args:
        uri: Path or URI of the run or the folder.
        storage: Storage of `uri`.
        config: Config of the run, or None if `uri` has no config file.
        step: Step of the checkpoint (default: the newest).
    """
    if config is not None:
        return RunWeights(open_checkpoint(uri, storage, config, step))
    checkpoint = open_folder(uri, storage, step)
    return None if checkpoint is None else RunWeights(checkpoint)


class RunWeights:
    """Weights of a run's checkpoint, as used for evaluation.

    If the learner keeps moving averages, the weights are the averages. Arrays without an average are taken from the parameters.

    Attributes:
        checkpoint: Checkpoint of the run.
        functional: The model as pure functions.
    """

    def __init__(self, checkpoint: RunCheckpoint | CompleteCheckpoint):
        self.checkpoint = checkpoint
        self.experiment: Any = checkpoint.config
        self.step = checkpoint.step
        self.functional = Functional.from_config(self.config)
        model = {"params": self.functional.abstract, "variables": self.functional.variables}
        checkpoint.migrate([f"{part}.{path}" for part, specs in model.items() for path in specs])
        self._check_model()

    @property
    def config(self) -> Node[Any]:
        """Config of the model."""
        return self.experiment.model

    @property
    def extra(self) -> dict[str, Any]:
        """Data other than arrays, such as the position in the input."""
        return self.checkpoint.extra

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the run's input."""
        return build_tokenizer(self.experiment)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See `axlearn_core.contracts.parts.Weights`."""
        return {p: source.spec for p, source in self._sources.items()}

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
        """See `axlearn_core.contracts.parts.Weights`."""
        places = select_tensors(pattern, shardings, self.specs(), str(self.checkpoint.uri))
        return self._read({p: self._sources[p] for p in places}, places)

    def read_objective(self) -> dict[str, jax.Array]:
        """Read the parameters of the training objective, such as a reward head, by dotted path in the objective.

        They are those for evaluation, on the default device. Empty if there are none, or if the checkpoint contains only a model.
        """
        sources = {p.removeprefix(PREFIX): x for p, x in self._trained_sources.items() if p.startswith(PREFIX)}
        return self._read(sources, dict.fromkeys(sources))

    def _read(self, sources: Mapping[str, Source], places: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        direct = {p: source.paths[0] for p, source in sources.items() if source.compute is None}
        arrays = self.checkpoint.arrays
        loaded = self.checkpoint.read({key: _array_spec(arrays[key], places[p]) for p, key in direct.items()})
        tensors = {p: loaded[key] for p, key in direct.items()}
        for path in sources.keys() - direct.keys():  # one at a time, so that the inputs of each can be freed
            tensors[path] = self._compute(sources[path], places[path])
        return {p: tensors[p] for p in sources}

    def _compute(self, source: Source, sharding: Sharding | None) -> jax.Array:
        assert source.compute is not None
        arrays, shape = self.checkpoint.arrays, source.spec.shape
        same = {
            p: sharding if tuple(arrays[p].shape) == shape else _replicated_sharding(sharding) for p in source.paths
        }
        loaded = self.checkpoint.read({p: _array_spec(arrays[p], place) for p, place in same.items()})
        return source.compute([loaded[p] for p in source.paths])

    @cached_property
    def _model(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {**self.functional.abstract, **self.functional.variables}

    @cached_property
    def _stored_paths(self) -> dict[str, str]:
        """Checkpoint path of each parameter and variable, by its path in the model."""
        parts = (p.partition(".") for p in self.checkpoint.arrays)
        weights = ((part, path) for part, _, path in parts if part in ("params", "variables"))
        return {path: f"{part}.{path}" for part, path in weights if not path.startswith(PREFIX)}

    @cached_property
    def _trained_sources(self) -> dict[str, Source]:
        """Source of each parameter of the model and the objective, or empty if the checkpoint contains only weights."""
        if self.checkpoint.weights_only:
            return {}
        trained = ModelAndObjective.from_config(self.experiment, self.functional)
        learner = self.experiment.learner.build(max_steps=self.experiment.max_steps, axes=trained.axes)
        return evaluation_sources(learner, trained.abstract)

    @cached_property
    def _sources(self) -> dict[str, Source]:
        arrays = self.checkpoint.arrays
        trained = self._trained_sources
        sources = {path: trained[path] for path in self.functional.abstract if trained}
        for path, key in self._stored_paths.items():
            if path not in sources or sources[path].paths == (f"params.{path}",) or key.startswith("variables."):
                spec = jax.ShapeDtypeStruct(arrays[key].shape, jax.numpy.dtype(arrays[key].dtype))
                sources[path] = Source(spec, (key,), None)
        missing = [f"missing: {p}" for s in sources.values() for p in s.paths if p not in arrays]
        if missing:
            raise CheckpointError(
                f"{self.checkpoint} lacks arrays that the learner needs for evaluation\n"
                + "\n".join(f"    {m}" for m in missing[:12])
                + "\n    fix: use the config that the run was trained with"
            )
        return {p: sources[p] for p in self._model}

    def _check_model(self) -> None:
        check_tensors(
            str(self.checkpoint),
            self._model,
            {p: self.checkpoint.arrays[key] for p, key in self._stored_paths.items()},
            fix="use the versions that wrote the run, or run `axlearn convert` with them",
        )


def check_tensors(name: str, model: Mapping[str, Any], stored: Mapping[str, Any], *, fix: str) -> None:
    """Compare the paths and shapes of a model's tensors with those of the stored tensors.

    Raises:
        CheckpointError: Lists tensors that are missing (with the nearest stored path) or unexpected, or that have the wrong shape.
    """
    spare = stored.keys() - model.keys()
    problems = []
    for path, spec in model.items():
        if path not in stored:
            close = nearest(path, spare, limit=1)
            problems.append(f"missing: {path} {list(spec.shape)}" + (f" (nearest: {close[0]})" if close else ""))
        elif tuple(stored[path].shape) != tuple(spec.shape):
            problems.append(f"differs: {path}: {list(stored[path].shape)} stored, {list(spec.shape)} in the model")
    problems += [f"unexpected: {path} {list(stored[path].shape)}" for path in stored if path in spare]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:20], *more])
        raise CheckpointError(f"the tensors of {name} do not match its model\n{listed}\n    fix: {fix}")


def select_tensors(
    pattern: str, shardings: Mapping[str, Sharding] | None, specs: Mapping[str, Any], name: str
) -> dict[str, Sharding | None]:
    """Return the shardings of the tensors that match a pattern, by path. For `Weights.read`.

    Raises:
        RequestError: If no tensor matches, if a sharding is missing, or if a path in `shardings` is unknown.
    """
    paths = select(pattern, specs, setting=f"the weights of {name}")
    if shardings is None:
        return dict.fromkeys(paths)
    problems = []
    for path in shardings:
        if path not in specs:
            close = nearest(path, specs, limit=1)
            problems.append(f"unknown: {path}" + (f" (did you mean: {close[0]}?)" if close else ""))
    problems += [f"without a sharding: {p}" for p in paths if p not in shardings]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:12], *more])
        raise RequestError(
            f"the shardings do not match the weights of {name}\n{listed}\n"
            "    fix: pass a sharding for each tensor to read, by its path in the model"
        )
    return {p: shardings[p] for p in paths}


def split_weights(tensors: Mapping[str, Any], functional: Functional) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a mapping of tensors keyed by dotted path into parameters and variables."""
    variables = functional.variables
    return {p: x for p, x in tensors.items() if p not in variables}, {p: tensors[p] for p in variables if p in tensors}


def bind_weights(functional: Functional, tensors: Mapping[str, Any]) -> Any:
    """Return the model with the given tensors."""
    return functional.bind(*split_weights(tensors, functional))


def _array_spec(info: Any, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(info.shape), jax.numpy.dtype(info.dtype), sharding=sharding)


def _replicated_sharding(sharding: Sharding | None) -> Sharding | None:
    """Return a replicated sharding on the same devices."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
