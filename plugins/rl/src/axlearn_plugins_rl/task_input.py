"""The input of reinforcement learning: the examples of a task in random order.

The training loop rolls the examples out and builds the batches. `Config.batch_shapes` declares their arrays.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import ConfigError, InputError, Problem, counted
from axlearn_plugins_rl.process_share import ProcessShare
from axlearn_plugins_rl.rollout_contracts import Example, Split, Task
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.cycle import Cycle, Permutations
from axlearn_plugins_transformer.text.language_model import describe_encoding
from axlearn_plugins_transformer.text.protocols import summarize_tokenizer
from axlearn_plugins_transformer.text.tokenizers import vocabulary_problems

ROW_ARRAYS = {
    "tokens": "int32",
    "targets": "int32",
    "weights": "float32",
    "positions": "int32",
    "advantages": "float32",
    "rollout_logprobs": "float32",
    "rewards": "float32",
}
"""Name -> dtype of the arrays [rows, sequence_length] of a batch.

With `packing`, there are also `segment_ids`. Without them there is only a causal mask, and training selects the engine's attention
kernel.
"""
EXPERTS_ENTRY = "layers.experts"
"""Name of the recorded experts in a batch, int16 [rows, sequence_length, layers, experts per token], with -1 for tokens without a
record."""


@attrs.frozen
class Draw:
    """An example that was drawn from the stream.

    Attributes:
        position: Position in the endless sequence of examples. No two draws of a run have the same one.
        example: The example.
    """

    position: int
    example: Example


class TaskInput(Configurable):
    """The examples of a task, reshuffled every epoch.

    Attributes:
        task: The task.
        tokenizer: Tokenizer of the model.
        share: The share of this process in each batch.
    """

    @node
    class Config(Configurable.Config["TaskInput"]):
        """The task and the sizes of a batch.

        Attributes:
            task: The task.
            tokenizer: Tokenizer of the model.
            template: Chat template. None uses the one next to the tokenizer's file.
            batch_size: Number of examples per step.
            group_size: Number of rollouts per example.
            sequence_length: Tokens per row. A trajectory has at most one token more.
            rows: Number of rows per batch. None uses `batch_size * group_size`. Set more if environments rewrite the history, since
                each rewrite needs another row.
            packing: Put several trajectories into a row if they fit, so that fewer rows are needed. It requires `rows`.
                Trajectories in a row do not attend to each other.
            experts: Number of layers and of experts per token that rollouts record, for replay. None records none.
            kept_tokens: Maximum number of tokens to record for each drawn token that top-k, top-p and min-p kept. 0 records none.
            shuffle: Shuffle the examples.
        """

        task: Node[Task] = REQUIRED
        tokenizer: Node[Tokenizer] = REQUIRED
        template: Node[ChatTemplate] | None = None
        batch_size: int = setting(default=8, gt=0, le=2**24)
        group_size: int = setting(default=8, gt=0, le=2**16)
        sequence_length: int = setting(default=REQUIRED, gt=0, le=2**24)
        rows: int | None = setting(default=None, gt=0, le=2**24)
        packing: bool = setting(default=False, hide_default=True)
        experts: tuple[int, int] | None = setting(default=None, hide_default=True)
        kept_tokens: int = setting(default=0, ge=0, hide_default=True)
        shuffle: bool = True

        def validate(self) -> Iterable[Problem]:
            """Check that every rollout has a row, or that the rows for packing are given."""
            rollouts = self.batch_size * self.group_size
            if self.packing and self.rows is None:
                yield Problem(
                    path="rows",
                    message="packing needs the number of rows",
                    got="null",
                    expected=f"the rows that the trajectories of {rollouts} rollouts fill",
                    fix="set rows, or set packing to false",
                )
            if not self.packing and self.rows is not None and self.rows < rollouts:
                yield Problem(
                    path="rows",
                    message="a batch has more rollouts than rows",
                    got=str(self.rows),
                    expected=f"at least batch_size * group_size = {rollouts}, or null",
                    fix="raise rows, or set packing to true",
                )

        @property
        def num_rows(self) -> int:
            """Number of rows per batch."""
            return self.batch_size * self.group_size if self.rows is None else self.rows

        def batch_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
            """Return the arrays of a training batch, name -> (shape, dtype)."""
            shape = (self.num_rows, self.sequence_length)
            arrays: dict[str, tuple[tuple[int, ...], str]] = {
                name: (shape, dtype) for name, dtype in ROW_ARRAYS.items()
            }
            if self.packing:
                arrays["segment_ids"] = shape, "int32"
            if self.experts is not None:
                arrays[EXPERTS_ENTRY] = (*shape, *self.experts), "int16"
            if self.kept_tokens:
                arrays["kept_tokens"] = (*shape, self.kept_tokens), "int32"
            return {**arrays, "temperature": ((self.num_rows,), "float32")}

        def fit_model(self, model: Any) -> "TaskInput.Config":
            """Return this config with the sizes of the experts that a model replays.

            See `axlearn_core.contracts.capabilities.FitsModel`.
            """
            if self.experts is None:
                return self
            from axlearn_plugins_rl.replayed_experts import count_replayed  # imports JAX

            return attrs.evolve(self, experts=count_replayed(model))

    def __init__(
        self,
        cfg: Config,
        *,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        vocab_size: int | None = None,
    ):
        if problems := list(_share_problems(cfg, process_count)):
            raise ConfigError(problems)
        self.config, self.seed = cfg, seed
        self.share = ProcessShare(process_index, process_count)
        self.tokenizer, self.vocab_size = cfg.tokenizer.build(), vocab_size
        if problems := list(vocabulary_problems(self.tokenizer, vocab_size)):
            raise ConfigError(problems)
        self.task = cfg.task.build(seed=seed)
        self._examples: dict[Split, Sequence[Example]] = {}
        self.examples("train")

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split.

        Raises:
            InputError: The task has no examples in this split.
        """
        if split not in self._examples:
            examples = self.task.examples(split)
            if not len(examples):
                fix = (
                    "change input.task" if split == "train" else "hold out examples in input.task, or set evaluators={}"
                )
                raise InputError(
                    f"input.task has no {split.replace('_', '-')} examples\n    got: a {type(self.task).__name__}\n    fix: {fix}"
                )
            self._examples[split] = examples
        return self._examples[split]

    def train(self) -> "ExampleStream":
        """Return the endless stream of examples."""
        return ExampleStream(self)

    def evaluation(self) -> Any:
        """Raise `InputError`, since a task has no held-out batches."""
        raise InputError(
            "input.task has no held-out loss, because its answers are sampled\n"
            "    fix: evaluate the reward: set evaluators.eval to {type: reward-evaluator}, or remove the loss evaluator"
        )

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run lock: the facts of the task, the number of its examples, and the tokenizer hash."""
        counts = {split: len(self.task.examples(split)) for split in ("train", "held_out")}
        return {**self.task.describe(), "examples": counts, "tokenizer": describe_encoding(self)}

    def summarize(self) -> Mapping[str, str]:
        """See `axlearn_core.contracts.capabilities.SummarizesData`."""
        count = len(self.examples("train"))
        return {
            "data": f"{count:,} examples of {type(self.task).__name__}",
            "tokenizer": summarize_tokenizer(self.tokenizer),
        }


def _share_problems(cfg: TaskInput.Config, processes: int) -> Iterator[Problem]:
    """Yield problems if the processes cannot have equal shares of a batch."""
    for path, size, unit in (("batch_size", cfg.batch_size, "example"), ("rows", cfg.num_rows, "row")):
        if size % processes:
            yield Problem(
                path=f"input.{path}",
                message=f"{counted(size, unit)} cannot be split evenly over {processes} processes",
                expected=f"a multiple of {processes}",
                fix=f"set input.{path} to {size + -size % processes}, or change the number of processes",
            )


class ExampleStream:
    """An endless stream of examples. See `axlearn_core.contracts.parts.BatchIterator`.

    Args:
        source: The input.
    """

    def __init__(self, source: TaskInput):
        self._source = source
        self._examples = source.examples("train")
        count = len(self._examples)
        permutation = Permutations(count, source.seed) if source.config.shuffle else None
        self._order = Cycle(count, source.config.batch_size, source.seed, permutation)
        self._position = 0

    def draw(self, count: int, part: slice = slice(None)) -> list[Draw]:
        """Move by `count` examples, and return a part of them."""
        positions = range(self._position, self._position + count)[part]
        self._position += count
        return [Draw(position, self._examples[self._order(position)]) for position in positions]

    def __iter__(self) -> "ExampleStream":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the positions of the next examples of this process, int64 [examples]. The loop calls `draw` instead."""
        size = self._source.config.batch_size
        draws = self.draw(size, self._source.share.select(size))
        return {"examples": np.asarray([d.position for d in draws], np.int64)}

    def get_state(self) -> Any:
        """Return the number of examples that were drawn."""
        return {"position": self._position}

    def set_state(self, state: Any) -> None:
        """Restore a position from `get_state`."""
        self._position = int(state["position"])

    def close(self) -> None:
        """Do nothing. The input does no background work."""
