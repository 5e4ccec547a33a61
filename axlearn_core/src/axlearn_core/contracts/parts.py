"""The replaceable parts of a trainer, as protocols. Whatever meets one fits in its slot.

Legend: B global batch, S sequence length, D width, V vocabulary. `@offers` says what the trainer offers at `build`; a part
takes of it what it declares (see `axlearn_core.config.offers`). What else a part may do is in
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
"""One batch. For language models:

tokens        int32   [B, S]  input token ids
targets       int32   [B, S]  the token after each input token
weights       float32 [B, S]  1 where the target counts in the loss, 0 for padding
segment_ids   int32   [B, S]  1.. for the documents packed into a row, 0 for padding
positions     int32   [B, S]  position within the row's piece of the document, from 0
bytes         float32 [B, S]  bytes of text that each target stands for; in evaluation only, for losses per byte
"""


@offers("rngs")
class Model(Protocol):
    """What the trainer knows of a model: an `nnx.Module` whose parameters carry logical axis names."""

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """The mean loss (float32 scalar) and summaries: float32 scalars, or an `axlearn_core.nn.summaries.Summary` each.

        `summaries["weight"]`, if given, is the number of targets that the mean is over. Gradient accumulation and
        evaluation weigh the loss and the scalars by it; a `Summary` says itself how it combines.

        Evaluation takes the same loss without what layers added by `add_loss`. A model that regularises by another way
        has a `held_out_loss` (`capabilities.HasHeldOutLoss`).
        """
        ...


@offers("rngs", "model")
class Objective(Protocol):
    """What a model is trained for: an `nnx.Module` that turns a bound model and a batch into a loss.

    `model` is the config of the trained model. Its arrays are part of the training state, at
    `objective.<path in the objective>`: an `nnx.Param` trains under the learner's rules, and any other variable is kept.
    A model that computes and never trains is an `axlearn_core.compose.FrozenModel` in it.

    Evaluation never takes `loss`, which may regularise. It takes the `evaluation_loss` of a
    `capabilities.HasEvaluationLoss`, of this objective or of one in it, and otherwise the model's own loss. An objective that
    depends on which rows are computed together says why in an attribute `batch_dependence`, as a layer does.
    """

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, Any]]:
        """(mean loss as a float32 scalar, summaries).

        Args:
            model: with its arrays; gradients pass through its methods.
            batch: arrays [B, ...], as the input gives them.
            key: what this call's random numbers are derived from; None if nothing is drawn.

        Returns:
            As `Model.loss`: `summaries["weight"]` is what the mean is over.
        """
        ...


class BatchIterator(Protocol):
    """An endless (training) or finite (evaluation) stream of this process's rows of each batch."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch, with B / process_count rows."""
        ...

    def get_state(self) -> Any:
        """The position after the batch returned last, as JSON-able data.

        With several processes their states are united, mappings key by key, and `set_state` gets the union.
        """
        ...

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` gave."""
        ...

    def close(self) -> None:
        """Ends worker processes and threads."""
        ...


@offers("seed", "process_index", "process_count", "vocab_size")
class Input(Protocol):
    """Where batches come from. `vocab_size` is offered where the model has one (`capabilities.HasVocabulary`)."""

    def train(self) -> BatchIterator:
        """Endless shuffled batches; the global stream is the same for any process count that divides the shards."""
        ...

    def evaluation(self) -> BatchIterator:
        """One pass over the held-out data in a fixed order, the last batch padded with weight 0."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Facts of the data: files, bytes, hashes of their names, sizes and contents, tokenizer hash.

        They are in the run lock and in each checkpoint. A run does not go on where one of them changed, so they depend on
        nothing but the data. `digests`, where given, is file -> hash, which names the file that changed.
        """
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids, with no special tokens added."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text, invalid UTF-8 replaced."""
        ...


class Loss(Protocol):
    """What a learner differentiates: the mean loss of a batch as a pure function."""

    def __call__(
        self, params: Any, variables: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Mapping[str, Any], Any]]:
        """(float32 scalar, (summaries, new variables)); see `Model.loss` for summaries.

        Args:
            params: path -> array; what gradients are taken by.
            variables: path -> array, of the model's other variables; empty where it has none.
            batch: arrays [B, ...].
            key: what this call's random numbers are derived from; None for a model without state.
        """
        ...


@offers("max_steps", "axes")
class Learner(Protocol):
    """Turns gradients into new parameters. `axes` is parameter path -> logical axis names."""

    def init(self, params: Any) -> Any:
        """The state (optimizer moments, EMA, counters) for a pytree of parameters."""
        ...

    def value_and_grad(
        self, loss: Loss, params: Any, variables: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, dict[str, Any], Any], Any]:
        """((mean loss, summaries, new variables), gradients) over the batch, in microbatches where the learner accumulates.

        Summaries are passed on; those of microbatches combine as in `axlearn_core.learn.value_and_grad`. Variables go from
        each microbatch to the next; each gets a key of its own, derived from `key`.
        """
        ...

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """What to evaluate and export with: the moving average where there is one, else `params`."""
        ...

    def update(self, grads: Any, state: Any, params: Any, loss: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        """(new params, new state, scalar summaries). Pure and traceable. Non-finite gradients change nothing.

        `summaries["skipped"]`, where given, is a bool: whether this step changed nothing. The trainer then keeps the model's
        variables too, and does not log it.
        """
        ...


@offers("directory")
class Checkpointer(Protocol):
    """Saves and restores training state.

    The trainer sets `files`: name -> text, or a function that gives it, to be kept inside each checkpoint.
    """

    files: Any

    def due(self, step: int) -> bool:
        """Whether the policy saves after `step`."""
        ...

    def save(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Starts saving a pytree of arrays and JSON-able `extra`; returns at once. False where the policy skips the step."""
        ...

    def latest_step(self) -> int | None:
        """The newest complete step."""
        ...

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        ...

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state, extra) of a step; `like` gives shapes, dtypes and shardings. Verifies before it reads.

        Where `extra["weights_only"]` is true, the checkpoint has `step`, `params` and `variables`; the rest stays as in
        `like`, and the trainer begins it anew.
        """
        ...

    def wait(self) -> None:
        """Blocks until every save that was started is complete; raises what went wrong in one."""
        ...

    def close(self) -> None:
        """Waits, then frees what it holds."""
        ...


@offers("run_dir")
class Tracker(Protocol):
    """Receives what is logged."""

    def start(self, info: Mapping[str, Any]) -> None:
        """Called once, with the run's facts: experiment, parameters, devices, max_steps, start_step."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step. Values of a step come in one call; evaluation results come in a call of their own."""
        ...

    def text(self, step: int, name: str, value: str) -> None:
        """A sample or message."""
        ...

    def close(self) -> None:
        """Writes out what is pending."""
        ...


@offers("run_dir")
class Profiler(Protocol):
    """Watches steps from inside, such as by a trace of some of them.

    Every process has one, over the same `run_dir`: name files by `jax.process_index()`.
    """

    def before(self, step: int) -> None:
        """Called before the step after `step` finished ones is started."""
        ...

    def after(self, step: int, scalars: Mapping[str, jax.Array]) -> None:
        """Called once the step is started; waiting for its `scalars` waits for it."""
        ...

    def close(self) -> None:
        """Called once, also where the run fails; ends what still runs."""
        ...


@offers("run_dir")
class Watchdog(Protocol):
    """Watches from a thread of its own that the run makes progress, and acts where it does not.

    Every process has one, over the same `run_dir`: name files by `jax.process_index()`.
    """

    def start(self) -> None:
        """Called once, before the first program is compiled."""
        ...

    def beat(self, phase: str, step: int) -> None:
        """Says that the run lives.

        Args:
            phase: what begins now: `restore`, `compile`, `input`, `step`, `evaluate`, `save`.
            step: how many steps are finished.
        """
        ...

    def close(self) -> None:
        """Called once, also where the run fails; ends the thread."""
        ...


@offers()
class ProcessGroup(Protocol):
    """How the processes of a job find one another."""

    def initialize(self) -> None:
        """Joins the job, once per process, before JAX looks for devices. Does nothing where it is joined."""
        ...


class Weights(Protocol):
    """The weights of one model, wherever they come from: parameters and other variables, without training state.

    Attributes:
        experiment: the root config that the model belongs to.
        step: how many training steps the weights have seen.
        tokenizer: turns text into the model's tokens; None where it takes no text.
    """

    @property
    def experiment(self) -> Node[Any]:
        """The root config that the model belongs to."""
        ...

    @property
    def config(self) -> Node[Any]:
        """The config of the model."""
        ...

    @property
    def step(self) -> int:
        """How many training steps the weights have seen."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Turns text into the model's tokens; None where it takes no text."""
        ...

    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every parameter and variable, by its dotted path in the model. Reads no tensor."""
        ...

    def read(self, pattern: str = "**", shardings: Mapping[str, Sharding] | None = None) -> Mapping[str, jax.Array]:
        """The tensors whose path fits `pattern` (`decoder.**.weight`), as `specs` says, each sharded as asked for.

        Reads one tensor after the other, and of each the parts that this process's devices hold. With several processes,
        all of them call it.

        Args:
            pattern: `*` stands for one part of a path, `**` for any number.
            shardings: path -> sharding, at least of what fits the pattern; None puts tensors onto the default device.

        Raises:
            RequestError: the pattern fits no tensor, a sharding is missing, or one is for an unknown path.
            CheckpointError: a file is damaged, named with the tensor.
        """
        ...
