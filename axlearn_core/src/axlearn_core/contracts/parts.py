"""The replaceable parts of a trainer, as protocols. Whatever meets one fits in its slot.

Legend: B global batch, S sequence length, D width, V vocabulary. A parent offers interface values at `build`; a part takes
those that it declares (see `axlearn_core.config.node`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

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


class Model(Protocol):
    """What the trainer knows of a model: an `nnx.Module` whose parameters carry logical axis names.

    Built with `rngs`.
    """

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """The mean loss (float32 scalar) and scalar summaries.

        `summaries["weight"]`, where given, is the number of targets that the mean is over; gradient accumulation and
        evaluation weigh by it.
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


class Input(Protocol):
    """Where batches come from. Built with `seed`, `process_index`, `process_count`, `vocab_size` where it declares them."""

    def train(self) -> BatchIterator:
        """Endless shuffled batches; the global stream is the same for any process count that divides the shards."""
        ...

    def evaluation(self) -> BatchIterator:
        """One pass over the held-out data in a fixed order, the last batch padded with weight 0."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Facts for the run lock: files, bytes, a hash of their names and sizes, tokenizer hash."""
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
    ) -> tuple[jax.Array, tuple[Mapping[str, jax.Array], Any]]:
        """(float32 scalar, (scalar summaries, new variables)).

        Args:
            params: path -> array; what gradients are taken by.
            variables: path -> array, of the model's other variables; empty where it has none.
            batch: arrays [B, ...].
            key: what this call's random numbers are derived from; None for a model without state.
        """
        ...


class Learner(Protocol):
    """Turns gradients into new parameters.

    Built with `max_steps` and `axes` (parameter path -> logical axis names).
    """

    def init(self, params: Any) -> Any:
        """The state (optimizer moments, EMA, counters) for a pytree of parameters."""
        ...

    def value_and_grad(
        self, loss: Loss, params: Any, variables: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, dict[str, jax.Array], Any], Any]:
        """((mean loss, summaries, new variables), gradients) over the batch, in microbatches where the learner accumulates.

        Variables go from each microbatch to the next; each gets a key of its own, derived from `key`.
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


class Checkpointer(Protocol):
    """Saves and restores training state. Built with `directory`.

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


class Tracker(Protocol):
    """Receives what is logged. Built with `run_dir`."""

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
