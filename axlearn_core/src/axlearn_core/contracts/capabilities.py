"""Optional capabilities of components. Callers test for them with `isinstance`, and also support components without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

    from axlearn_core.config import Node
    from axlearn_core.contracts.parts import ProcessGroup


@runtime_checkable
class HasVocabulary(Protocol):
    """A model with a vocabulary. Inputs are offered its `vocab_size`.

    Attributes:
        vocab_size: Number of token IDs.
    """

    vocab_size: int


@runtime_checkable
class HasClasses(Protocol):
    """Config of a model that classifies. Inputs are offered its `num_classes`.

    Attributes:
        num_classes: Number of classes. Labels are below it.
    """

    num_classes: int


@runtime_checkable
class HasProcessGroup(Protocol):
    """Config of an experiment whose processes must join a job before JAX initializes devices."""

    distributed: Node[ProcessGroup]


@runtime_checkable
class GeneratesTokens(Protocol):
    """A model that generates tokens."""

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, eos_id: int | None, program: Any
    ) -> Iterator[int]:
        """Yield the tokens after `prompt`.

        Args:
            prompt: At least one token ID.
            max_tokens: Maximum number of tokens.
            temperature: Sampling temperature. 0 selects the most likely token.
            seed: Seed for sampling.
            eos_id: ID of the token that ends the text. This token is also yielded.
            program: Program of the model's experiment. None compiles the model separately.
        """
        ...


@runtime_checkable
class EndsStep(Protocol):
    """A module that updates its variables once per training step, after the last microbatch."""

    def end_step(self) -> None:
        """Update variables from the totals of the step (`axlearn_core.nn.variables.StepTotal`). Traceable."""
        ...


@runtime_checkable
class DependsOnBatch(Protocol):
    """A module whose result for a row depends on the other rows of the batch.

    Attributes:
        batch_dependence: Reason, phrased as a predicate of the module (`"balances its load over the batch"`). None if its settings
            make it independent.
    """

    batch_dependence: str | None


@runtime_checkable
class HasConstantTerms(Protocol):
    """Config of an objective, or of a part of one, whose gradients differ from the derivatives of the loss."""

    @property
    def constant_terms(self) -> str | None:
        """The terms that have no gradient although they depend on the parameters, as a plural noun phrase.

        For example, `"the limited ratios"`. None if its settings have no such terms.
        """
        ...


@runtime_checkable
class DeclaresFunctions(Protocol):
    """Root config of an experiment that can be compiled, such as a trainer."""

    def functions(self, functional: Any) -> Mapping[str, Any]:
        """Return the experiment's functions (`axlearn_core.compose.Function`) by name."""
        ...


@runtime_checkable
class DeclaresBatches(Protocol):
    """Config of an input that knows its batch shapes without reading data. Plans use these shapes."""

    def batch_shapes(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """Return the global shape and dtype of each batch array by name. Empty if they depend on the data."""
        ...


@runtime_checkable
class FitsModel(Protocol):
    """Config of an input whose batches have sizes of the model, such as its number of layers."""

    def fit_model(self, model: Any) -> Any:
        """Return this config with the sizes of a model's config. Call it after a change of those sizes."""
        ...


@runtime_checkable
class SummarizesData(Protocol):
    """An input that can summarize its data for the user."""

    def summarize(self) -> Mapping[str, str]:
        """Return a short description of each part, such as `{"data": "3 files, 1,204 bytes"}`.

        The checks before a run print these summaries.
        """
        ...


@runtime_checkable
class DescribesPosition(Protocol):
    """A batch iterator that can describe its position in the data."""

    def describe_position(self) -> Any:
        """Return an object whose `str` describes the files and offsets of the last batch, for use in messages.

        This is called at every step, so delay any lookup until `str` is called.
        """
        ...


@runtime_checkable
class FollowsTraining(Protocol):
    """A batch iterator whose batches depend on the training state, such as one of rollouts.

    Its batches cannot be read ahead. If it fails in one process of a job, it raises an error on all of them at the same step.

    Attributes:
        follows_training: The reason, phrased as a predicate of the batches (`"are rollouts of the present weights"`).
    """

    follows_training: str


@runtime_checkable
class LocatesDocuments(Protocol):
    """A position (see `DescribesPosition`) that can name the source of a document in its batch."""

    def locate(self, batch: Mapping[str, Any], row: int, start: int, stop: int) -> str:
        """Return the file that a document is in and its place there, or an empty string if it is unknown.

        Args:
            batch: The batch, as the iterator returned it.
            row: Row of the document.
            start: First position of the document in the row.
            stop: Position just after the end of the document.
        """
        ...


@runtime_checkable
class StacksMaps(Protocol):
    """A linear layer that can also have a stack of weights, for example one weight per expert."""

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """Apply a stack of layers, each to its group of rows; see `axlearn_core.nn.linear.Linear.grouped`."""
        ...


@runtime_checkable
class HasLearningRate(Protocol):
    """Config of an optimizer with a single learning rate.

    Attributes:
        learning_rate: A number, the config of a schedule, or a function of the step.
    """

    learning_rate: Any


@runtime_checkable
class PlacesState(Protocol):
    """A learner that chooses where its state is stored, for example in host memory instead of next to the parameters."""

    def place(self, shardings: Any, state: Any) -> Any:
        """Return the shardings of the learner's state.

        Args:
            shardings: Default shardings, derived from the parameters, in the structure of the state.
            state: Abstract state.
        """
        ...


@runtime_checkable
class FreezesVariables(Protocol):
    """A learner that can freeze variables that training updates without gradients (`LearnedVariable`)."""

    def frozen_variables(self, paths: Iterable[str]) -> Collection[str]:
        """Return the variables that no step changes.

        Args:
            paths: Dotted paths of all such variables.
        """
        ...


@runtime_checkable
class ChecksTraining(Protocol):
    """A learner that may be unable to train, such as one for a model with integer weights."""

    def check_training(self) -> None:
        """Check that training is possible. Called before anything is written.

        Raises:
            RequestError: If training is not possible.
        """
        ...


@runtime_checkable
class FreezesParameters(Protocol):
    """A learner that can freeze parameters."""

    def frozen_params(self, paths: Iterable[str]) -> Collection[str]:
        """Return the parameters that no update changes.

        Args:
            paths: Dotted paths of all parameters.
        """
        ...


@runtime_checkable
class ObservesSteps(Protocol):
    """A watchdog that inspects the results of steps."""

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Inspect the scalars of a step, such as `loss`. Called after each step."""
        ...


@runtime_checkable
class ChecksStart(Protocol):
    """A training loop that needs something to start a run, such as a finished source run, but not to resume one."""

    def check_start(self) -> None:
        """Check the requirements before anything is written. Called only at step 0.

        Raises:
            RequestError: If a requirement is missing or invalid.
        """
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A training loop whose state belongs in checkpoints, such as a loop with a buffer of samples.

    The state is a tree of JSON values and NumPy arrays. In a multi-process job, the states of all processes are merged like those
    of `parts.BatchIterator`.
    """

    def get_state(self) -> Any:
        """Return the state after the session's step. Called before each save."""
        ...

    def set_state(self, state: Any) -> None:
        """Restore a state that `get_state` returned. Called before `run`, if the checkpoint contains a state."""
        ...


@runtime_checkable
class LoadsInitialWeights(Protocol):
    """Config of a training loop that starts a run with existing weights, such as those of a finished run."""

    def without_initial_weights(self) -> Node[Any]:
        """Return the config of the loop for a run that already has its weights."""
        ...


@runtime_checkable
class HasEvaluationLoss(Protocol):
    """An objective with a separate loss for held-out batches, for example because the model cannot read the input's batches."""

    def evaluation_loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the mean loss and summaries of a held-out batch, without random numbers or auxiliary terms."""
        ...


@runtime_checkable
class HasHeldOutLoss(Protocol):
    """A model whose training loss has terms that do not belong in evaluation, such as a penalty."""

    def held_out_loss(self, batch: Mapping[str, Any]) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the mean loss and summaries of a held-out batch, without the terms that do not belong in evaluation."""
        ...


def vocabulary_size(model: object) -> int | None:
    """Return the vocabulary size of a model, or None if it has no vocabulary."""
    return model.vocab_size if isinstance(model, HasVocabulary) else None


def get_learning_rate(optimizer: object) -> Any:
    """Return the learning rate of an optimizer's config, or None if it does not have a single one."""
    return optimizer.learning_rate if isinstance(optimizer, HasLearningRate) else None


@runtime_checkable
class OwnsCheckpoints(Protocol):
    """A checkpointer whose checkpoints belong to a run.

    Attributes:
        run: ID of the run. The trainer sets it before the first save.
        place: Location of the checkpoints: its `storage`, and its `name` for use in messages.
    """

    run: str
    place: Any

    def owner(self) -> str:
        """Return the ID of the run that wrote the newest checkpoint, or an empty string if it is unknown."""
        ...

    def restart(self) -> None:
        """Start again at step 0 and rename all existing checkpoints."""
        ...


@runtime_checkable
class ReportsSaves(Protocol):
    """A checkpointer that reports the result of each save.

    Attributes:
        on_result: Called with the step of a checkpoint and the reason why its save failed, or None if it succeeded. The trainer
            sets it before the first save. It may be called from any thread, on each process.
    """

    on_result: Callable[[int, str | None], None]


@runtime_checkable
class KeepsLocalTier(Protocol):
    """A checkpointer that also saves the state locally on the job's machines, at shorter intervals.

    All processes must call these methods together.
    """

    def local_due(self, step: int) -> bool:
        """Return True if the policy saves a local state after `step`."""
        ...

    def save_local(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Save a local state, like `Checkpointer.save`. Failures only log a warning and do not affect other checkpoints."""
        ...

    def restore_newest(self, like: Any) -> tuple[Any, dict[str, Any], int] | None:
        """Restore the newest complete state from any tier. Return the state, `extra`, and the step, or None."""
        ...

    def step_behind(self, step: int) -> int | None:
        """Return an earlier checkpoint to go back to, or None to continue.

        Called if the results of `step` are not finite soon after a local state was restored.
        """
        ...


@runtime_checkable
class StopsEarly(Protocol):
    """A run listener that can stop the run before `max_steps`, for example after a signal."""

    def begin(self) -> None:
        """Called when the loop starts. The listener may replace the session's `batches`."""
        ...

    def end(self) -> None:
        """Called when the loop has ended, even after an error."""
        ...

    def next_batch(self) -> Any:
        """Return the next batch from the session's `batches`, or None to stop without another batch.

        Propagate errors from the input.
        """
        ...

    def should_stop(self) -> bool:
        """Return True to stop at the session's step. All processes must return the same value.

        If a signal requested the stop, set the session's `stop_signal`.
        """
        ...

    def raise_failure(self) -> None:
        """Raise the error that stopped the run, if there is one, on all processes. Called after the loop has returned."""
        ...


@runtime_checkable
class MirrorsRun(Protocol):
    """A run listener that copies the files of a run at a URI to its storage."""

    def push(self) -> None:
        """Copy changed files to the storage."""
        ...


@runtime_checkable
class KeepsExecutables(Protocol):
    """A run listener that stores the compiled step for processes that resume the run."""

    def load_step(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load the compiled step for a batch into the program, on all processes or on none.

        Returns:
            The facts that `keep_step` stored. Empty if the step is not loaded.
        """
        ...

    def keep_step(self, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Store the step that process 0 compiled, and facts about it."""
        ...
