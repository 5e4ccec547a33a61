"""Protocols for the replaceable components of a trainer.

Shapes: B global batch, S sequence length, D width, V vocabulary. `@offers` lists the arguments that the trainer offers to
`build`; a component receives those that it declares (see `axlearn_core.config.offers`). For optional capabilities, see
`axlearn_core.contracts.capabilities`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from axlearn_core.config.offers import offers

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.sharding import Sharding

    from axlearn_core.config import Node

Batch = Mapping[str, Any]
"""A batch of arrays. For language models:

tokens        int32   [B, S]  input token IDs
targets       int32   [B, S]  the next token for each input token
weights       float32 [B, S]  1 for targets that count toward the loss, 0 for padding
segment_ids   int32   [B, S]  1, 2, ... for the documents packed into a row, 0 for padding
positions     int32   [B, S]  position within the row's part of the document, from 0
bytes         float32 [B, S]  bytes of text per target; only in evaluation, for losses per byte
"""


@offers("rngs")
class Model(Protocol):
    """A model: an `nnx.Module` whose parameters have logical axis names."""

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the mean loss, a float32 scalar, and summaries.

        A summary is a float32 scalar or an `axlearn_core.nn.summaries.Summary`, which defines how it is combined. The
        optional `summaries["weight"]` is the number of targets in the mean. Gradient accumulation and evaluation weight the
        loss and the scalars by it.

        Evaluation uses the same loss, but without the terms that layers add with `add_loss`. A model with other
        regularization terms defines `held_out_loss` (`capabilities.HasHeldOutLoss`).
        """
        ...


@offers("rngs", "model")
class Objective(Protocol):
    """A training objective: an `nnx.Module` that computes a loss from a bound model and a batch.

    The trainer offers `model`, the config of the trained model. The arrays of the objective are part of the training state, with
    the prefix `objective.`. The learner trains each `nnx.Param`. Other variables keep the values that `loss` assigns to them. Use
    an `axlearn_core.compose.FrozenModel` for a model that is not trained, and a `TrainedModel` for one that starts from existing
    weights.

    Evaluation does not use `loss`, which may include regularization. It uses the `evaluation_loss` of this objective or of
    one that it wraps (`capabilities.HasEvaluationLoss`), or else the loss of the model. If the loss of a row depends on the
    other rows of the batch, set the `batch_dependence` attribute to the reason, as layers do.
    """

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the mean loss, a float32 scalar, and summaries.

        Args:
            model: Model with its arrays. Its methods are differentiable.
            batch: Arrays [B, ...] from the input.
            key: Random key for this call, or None if no random numbers are drawn.

        Returns:
            The same values as `Model.loss`.
        """
        ...


class BatchIterator(Protocol):
    """A stream of batches, infinite for training and finite for evaluation. It yields the rows of this process."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the next batch, with B / process_count rows."""
        ...

    def get_state(self) -> Any:
        """Return the position after the last batch, as JSON-serializable data.

        The states of several processes are merged key by key, and `set_state` receives the merged state.
        """
        ...

    def set_state(self, state: Any) -> None:
        """Restore a position that `get_state` returned."""
        ...

    def close(self) -> None:
        """Stop worker processes and threads."""
        ...


@offers("seed", "process_index", "process_count", "vocab_size", "num_classes")
class Input(Protocol):
    """Source of batches.

    `vocab_size` and `num_classes` are offered only if the model has them (`capabilities.HasVocabulary`, `capabilities.HasClasses`).
    """

    def train(self) -> BatchIterator:
        """Return infinite shuffled batches.

        The global stream is the same for every number of processes that divides the number of shards.
        """
        ...

    def evaluation(self) -> BatchIterator:
        """Return one pass over the held-out data in a fixed order. The last batch is padded with weight 0."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return facts about the data: files, sizes, hashes of names and contents, tokenizer hash.

        The run lock and each checkpoint store them, and a run cannot resume if one changes. They must therefore depend
        only on the data. The optional `digests` maps files to hashes, so that an error can name the file that changed.
        """
        ...


class Tokenizer(Protocol):
    """Converts text to token IDs and back."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Return token IDs, without adding special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text. Replace invalid UTF-8."""
        ...


class Loss(Protocol):
    """The mean loss of a batch as a pure function, which the learner differentiates."""

    def __call__(
        self, params: Any, variables: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Mapping[str, Any], Any]]:
        """Return `(loss, (summaries, new variables))`. The loss is a float32 scalar; for summaries, see `Model.loss`.

        Args:
            params: Parameters keyed by path. Gradients are with respect to these parameters.
            variables: Variables of the model by path. Empty if it has none.
            batch: Arrays [B, ...].
            key: Random key for this call, or None for a model without state.
        """
        ...


@offers("max_steps", "axes")
class Learner(Protocol):
    """Updates parameters from gradients. The trainer offers `axes`, the logical axis names of parameters keyed by path."""

    def init(self, params: Any) -> Any:
        """Return the initial state (optimizer moments, EMA, counters) for a pytree of parameters."""
        ...

    def value_and_grad(
        self, loss: Loss, params: Any, variables: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, dict[str, Any], Any], Any]:
        """Return `((mean loss, summaries, new variables), gradients)` for a batch, accumulated over microbatches.

        Summaries of microbatches are combined as in `axlearn_core.learn.value_and_grad`. Each microbatch receives the
        variables of the previous one, and a different key derived from `key`.
        """
        ...

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """Return the parameters for evaluation and export: the moving average if there is one, else `params`."""
        ...

    def update(self, grads: Any, state: Any, params: Any, loss: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Return new parameters, new state, and scalar summaries. Pure and traceable. Skip updates with non-finite gradients.

        The optional bool `summaries["skipped"]` is True if this step changed nothing. The trainer then keeps the model's
        variables unchanged too. It does not log this value.
        """
        ...


@offers("directory")
class Checkpointer(Protocol):
    """Saves and restores training state.

    The trainer sets `files`, text files to store in each checkpoint, by name. A value is the text or a function that returns
    it.
    """

    files: Any

    def due(self, step: int) -> bool:
        """Return True if the policy saves after `step`."""
        ...

    def save(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Start saving a pytree of arrays and JSON-serializable `extra`. Return False if the policy skips the step."""
        ...

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        ...

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        ...

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Verify and restore the state and `extra` of a step. `like` defines shapes, dtypes, and shardings.

        If `extra["weights_only"]` is true, the checkpoint contains only `step`, `params`, and `variables`. The rest is taken
        from `like`, and the trainer initializes it.
        """
        ...

    def wait(self) -> None:
        """Block until every save is complete. Raise the error from a failed save."""
        ...

    def close(self) -> None:
        """Wait for all saves, then release resources."""
        ...


@offers("run_dir")
class Tracker(Protocol):
    """Receives logged values."""

    def start(self, info: Mapping[str, Any]) -> None:
        """Start a run with these facts: experiment, parameters, trained_parameters, devices, max_steps, start_step.

        Called once.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a step. Training metrics and the results of each evaluation are passed in separate calls."""
        ...

    def text(self, step: int, name: str, value: str) -> None:
        """Log a sample or a message."""
        ...

    def close(self) -> None:
        """Flush pending values."""
        ...


@offers("run_dir")
class Profiler(Protocol):
    """Profiles steps, for example by tracing some of them.

    Every process has a profiler with the same `run_dir`, so include `jax.process_index()` in file names.
    """

    def before(self, step: int) -> None:
        """Called before the next step starts. `step` is the number of finished steps."""
        ...

    def after(self, step: int, scalars: Mapping[str, jax.Array]) -> None:
        """Called after the step has been dispatched. Blocking on its `scalars` waits for the step."""
        ...

    def close(self) -> None:
        """Stop profiling. Called once, even if the run fails."""
        ...


@offers("run_dir")
class Watchdog(Protocol):
    """Watches the progress of a run from a separate thread, and acts if it stalls.

    Every process has a watchdog with the same `run_dir`, so include `jax.process_index()` in file names.
    """

    def start(self) -> None:
        """Start watching. Called once, before the first program is compiled."""
        ...

    def beat(self, phase: str, step: int) -> None:
        """Record a heartbeat.

        Args:
            phase: Phase that starts now: `restore`, `compile`, `input`, `rollout`, `step`, `evaluate`, `save`.
            step: Number of finished steps.
        """
        ...

    def close(self) -> None:
        """Stop the thread. Called once, even if the run fails."""
        ...


@offers()
class ProcessGroup(Protocol):
    """Connects the processes of a job."""

    def initialize(self) -> None:
        """Join the job. Called once per process, before JAX initializes devices. No-op if the process has already joined."""
        ...


class Weights(Protocol):
    """Weights of a model from any source: parameters and variables, without training state.

    Attributes:
        experiment: Root config of the experiment.
        step: Number of steps that the weights were trained for.
        tokenizer: Tokenizer of the model, or None if it has no text input.
    """

    @property
    def experiment(self) -> Node[Any]:
        """Root config of the experiment."""
        ...

    @property
    def config(self) -> Node[Any]:
        """Config of the model."""
        ...

    @property
    def step(self) -> int:
        """Number of steps that the weights were trained for."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model, or None if it has no text input."""
        ...

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every parameter and variable by dotted path, without reading tensors."""
        ...

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> Mapping[str, jax.Array]:
        """Read the tensors whose path matches a pattern, such as `decoder.**.weight`.

        Tensors are read one at a time, and each process reads only the parts for its devices. All processes must call this.

        Args:
            pattern: Pattern in which `*` matches one part of a path and `**` matches any number of parts.
            shardings: Shardings by path, for at least the matching tensors. None uses the default device.

        Raises:
            RequestError: If no tensor matches, if a sharding is missing, or if a path in `shardings` is unknown.
            CheckpointError: If a file is damaged. The message names the file and the tensor.
        """
        ...
