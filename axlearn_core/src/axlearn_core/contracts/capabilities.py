"""What a part may do in addition to its protocol. Callers ask with `isinstance` and go without it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

    from axlearn_core.config import Node
    from axlearn_core.contracts.parts import ProcessGroup


@runtime_checkable
class HasVocabulary(Protocol):
    """A model of tokens. Inputs are offered its `vocab_size`.

    Attributes:
        vocab_size: token ids are below it.
    """

    vocab_size: int


@runtime_checkable
class HasProcessGroup(Protocol):
    """The config of an experiment whose processes join before JAX says which devices there are."""

    distributed: Node[ProcessGroup]


@runtime_checkable
class GeneratesTokens(Protocol):
    """A model that continues a sequence."""

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, eos_id: int | None, program: Any
    ) -> Iterator[int]:
        """The tokens after `prompt`, one by one.

        Args:
            prompt: token ids, at least one.
            max_tokens: how many at most.
            temperature: 0 takes the likeliest token each time.
            seed: of what is drawn.
            eos_id: the id that ends the text, which is yielded too.
            program: of the experiment that the model belongs to; None compiles the model on its own.
        """
        ...


@runtime_checkable
class EndsStep(Protocol):
    """A module that changes its variables once per training step, after the last microbatch."""

    def end_step(self) -> None:
        """Reads the totals of the step (`axlearn_core.nn.variables.StepTotal`) and writes variables. Traceable."""
        ...


@runtime_checkable
class DependsOnBatch(Protocol):
    """A module that computes something else for a row when other rows stand beside it.

    Attributes:
        batch_dependence: why, as the end of a sentence about the module (`"balances its load over the batch"`); None where
            its settings make it independent.
    """

    batch_dependence: str | None


@runtime_checkable
class DeclaresFunctions(Protocol):
    """The root config of an experiment that can be compiled: a trainer's."""

    def functions(self, functional: Any) -> Mapping[str, Any]:
        """Name -> `axlearn_core.compose.Function`: what the experiment computes with a model."""
        ...


@runtime_checkable
class DeclaresBatches(Protocol):
    """An input's config that knows its batches without reading data, so that plans need none."""

    def batch_shapes(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """Name -> (shape of the global batch's array, dtype); empty where only the data tells."""
        ...


@runtime_checkable
class DescribesPosition(Protocol):
    """A batch iterator that can say where its newest batch is in the data."""

    def describe_position(self) -> Any:
        """Files and offsets of the batch returned last, for a message to a person: what `str` gives of it, which is asked for
        only where there is a message. It is asked at every step, so it should look nothing up before."""
        ...


@runtime_checkable
class StacksMaps(Protocol):
    """A linear map whose module can also be a stack of maps, such as the matrices of experts."""

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """Each row of x times the map of its group; see `axlearn_core.nn.linear.Linear.grouped`."""
        ...


@runtime_checkable
class HasLearningRate(Protocol):
    """The config of an optimizer that has one learning rate, as those of optax do.

    Attributes:
        learning_rate: a number, the config of a schedule, or a function of the step.
    """

    learning_rate: Any


@runtime_checkable
class PlacesState(Protocol):
    """A learner that keeps its state elsewhere than the parameters are, such as in the host's memory."""

    def place(self, shardings: Any, state: Any) -> Any:
        """The shardings of its state.

        Args:
            shardings: those of the parameters, in the structure of the state.
            state: the abstract state.
        """
        ...


@runtime_checkable
class FreezesVariables(Protocol):
    """A learner that can keep a part of a model as it is."""

    def frozen_variables(self, paths: Iterable[str]) -> Collection[str]:
        """Of the variables that training changes by rules of their own (`LearnedVariable`), those that stay as they are.

        Args:
            paths: dotted, as those of parameters.
        """
        ...


@runtime_checkable
class ObservesSteps(Protocol):
    """A watchdog that looks at what steps compute."""

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Called after each step with its scalars, such as `loss`."""
        ...


@runtime_checkable
class ChecksBeginning(Protocol):
    """A loop that needs something elsewhere to begin, such as another run. A run that goes on does not need it."""

    def check_beginning(self) -> None:
        """Checks it before anything is written; called at step 0 only.

        Raises:
            RequestError: it is missing, or not what the loop needs.
        """
        ...


@runtime_checkable
class BeginsElsewhere(Protocol):
    """The config of a loop that begins a run with weights from elsewhere."""

    def begun(self) -> Node[Any]:
        """The config of the loop for a run that has its weights."""
        ...


@runtime_checkable
class HasEvaluationLoss(Protocol):
    """An objective with a measure of its own for held-out batches, such as one whose batches the model cannot read."""

    def evaluation_loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, Mapping[str, Any]]:
        """(mean loss, summaries) of a held-out batch; as `Objective.loss`, without random numbers or auxiliary terms."""
        ...


@runtime_checkable
class HasHeldOutLoss(Protocol):
    """A model whose training loss has terms of its own that are no part of its score, such as a penalty."""

    def held_out_loss(self, batch: Mapping[str, Any]) -> tuple[jax.Array, Mapping[str, Any]]:
        """(mean loss, summaries) of a held-out batch; as `Model.loss`, of the model's scores alone."""
        ...


def vocabulary_size(model: object) -> int | None:
    """Of a model; None where it has no tokens."""
    return model.vocab_size if isinstance(model, HasVocabulary) else None


def learning_rate_of(optimizer: object) -> Any:
    """Of an optimizer's config; None if it has no single one."""
    return optimizer.learning_rate if isinstance(optimizer, HasLearningRate) else None


@runtime_checkable
class OwnsCheckpoints(Protocol):
    """A checkpointer whose checkpoints belong to a run.

    Attributes:
        run: the id of the run that saves; the trainer sets it before the first save.
        place: where the checkpoints lie: its `storage` and its `name` for people.
    """

    run: str
    place: Any

    def owner(self) -> str:
        """The id of the run that wrote the newest checkpoint; empty where there is none, or it does not say."""
        ...

    def restart(self) -> None:
        """Begins at step 0: sets aside every checkpoint that is there."""
        ...


@runtime_checkable
class ReportsSaves(Protocol):
    """A checkpointer that reports the end of each save.

    Attributes:
        on_result: called with the step of a checkpoint, and None once it is complete, or the reason why it failed. The trainer
            sets it before the first save. It may be called from any thread, on each process.
    """

    on_result: Callable[[int, str | None], None]


@runtime_checkable
class KeepsLocalTier(Protocol):
    """A checkpointer that also keeps states on the machines of the job, more often than it saves.

    All processes call these together.
    """

    def local_due(self, step: int) -> bool:
        """Whether the state after `step` is kept locally."""
        ...

    def save_local(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """As `Checkpointer.save`. What fails is a warning: the other checkpoints stay what they are."""
        ...

    def restore_newest(self, like: Any) -> tuple[Any, dict[str, Any], int] | None:
        """(state, extra, step) of the newest step that is whole, wherever it is kept; None where there is none."""
        ...

    def step_behind(self, step: int) -> int | None:
        """A checkpoint to go back to because `step` was not finite soon after a local restore; None goes on instead."""
        ...


@runtime_checkable
class StopsEarly(Protocol):
    """A listener of a run that ends it before `max_steps`, for example when the process is sent a signal."""

    def begin(self) -> None:
        """The loop begins. The listener may replace the session's `batches`."""
        ...

    def end(self) -> None:
        """The loop has ended, also after an error."""
        ...

    def next_batch(self) -> Any:
        """The next of the session's `batches`; None if the run stops without it. Raises what the input raises."""
        ...

    def stops(self) -> bool:
        """Whether the run stops at the session's step. All processes get the same answer.

        If a signal asked for it, the listener sets the session's `stop_signal`.
        """
        ...

    def raise_failure(self) -> None:
        """Raises the error that stopped the run on all processes, if there is one. Called after the loop has returned."""
        ...


@runtime_checkable
class MirrorsRun(Protocol):
    """A listener of a run at a URI that copies the run's files to the storage."""

    def push(self) -> None:
        """Copies changed files to the storage."""
        ...


@runtime_checkable
class KeepsExecutables(Protocol):
    """A listener of a run that keeps the compiled step for the processes that continue the run."""

    def load_step(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loads the step for a batch into the program, on all processes or on none.

        Returns:
            What was known of the step when it was compiled; empty if it is not loaded.
        """
        ...

    def keep_step(self, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Keeps the step that the first process compiled, with what is known of it."""
        ...
