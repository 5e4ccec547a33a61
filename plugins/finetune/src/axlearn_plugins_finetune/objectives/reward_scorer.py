"""Score answers with a reward model that was trained with the feature `reward-model`.

Shapes: R rows, S positions per row.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Array, Function, ModelWeights
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.contracts.experiment import get_input_config, get_objective_config
from axlearn_core.errors import RequestError
from axlearn_core.run import open_weights
from axlearn_core.run.weights import RunWeights, split_weights
from axlearn_plugins_finetune.objectives.answer_encoder import AnswerEncoder
from axlearn_plugins_finetune.objectives.bradley_terry import BradleyTerry, last_hidden
from axlearn_plugins_finetune.objectives.preference_input import AnswerInput

SHORTEST = 32
"""Minimum padded length of a row. Longer rows are padded to a power of two, so that few shapes are compiled."""
HEAD = "head.weight"


class RewardScorer:
    """Scores answers. Compiles once for each power of two of the length.

    Attributes:
        length: Maximum number of tokens of a prompt with its answer, which is the length of the rows in training.
        encoder: Encodes text as in training.
    """

    def __init__(self, weights: RunWeights, head: jax.Array, *, batch_tokens: int = 8192):
        """Load the weights of a reward model.

        Args:
            weights: Weights of the model.
            head: Weight of the head, float32 [D, 1].
            batch_tokens: Number of tokens per batch, including padding.
        """
        cfg: Any = get_input_config(weights.experiment)
        self.length: int = cfg.sequence_length
        self.encoder = AnswerEncoder(cfg.tokenizer.build(), cfg.special_tokens, vocabulary_size(weights.config))
        self._batch_tokens, self._head = batch_tokens, head

        def declare(model: Any) -> dict[str, Function]:
            return {"reward": Function(call=_rewards, inputs=lambda rows: _inputs(rows, head.shape))}

        self._program = ModelProgram(weights.functional, jax.local_devices()[:1], declare=declare)
        self._weights = self._program.place(ModelWeights(*split_weights(weights.read(), weights.functional)))

    @classmethod
    def open(cls, uri: str, *, step: int | None = None) -> "RewardScorer":
        """Open a run of the feature `reward-model`.

        Args:
            uri: The run.
            step: Step of the checkpoint (default: the newest).

        Raises:
            CheckpointError: There are no weights.
            RequestError: The weights are not those of a reward model.
        """
        weights = open_weights(uri, step=step)
        objective = get_objective_config(weights.experiment)
        is_reward = isinstance(objective, BradleyTerry.Config)
        is_reward = is_reward and isinstance(get_input_config(weights.experiment), AnswerInput.Config)
        arrays = weights.read_objective() if isinstance(weights, RunWeights) and is_reward else {}
        if not isinstance(weights, RunWeights) or HEAD not in arrays:
            raise RequestError(
                f"{uri} is not a reward model\n"
                f"    got: the objective {'none' if objective is None else type(objective).__qualname__}, "
                f"and its parameters {', '.join(arrays) or 'none'}\n"
                "    expected: a run of `axlearn train ... --with reward-model:data=...`"
            )
        return cls(weights, arrays[HEAD])

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the rewards of answers, float32 [N].

        Args:
            pairs: Prompts and answers.

        Raises:
            RequestError: A prompt with its answer is too long.
        """
        return self.score_tokens([self.encoder.join(*pair)[0][:-1] for pair in pairs])

    def score_tokens(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the reward of each row, float32 [N], at its last token. A row is `[bos, prompt..., answer...]`.

        Raises:
            RequestError: A row is empty or too long.
        """
        for i, row in enumerate(rows):
            if not 0 < len(row) <= self.length:
                raise RequestError(
                    f"row {i} cannot be scored\n    got: {len(row)} tokens\n"
                    f"    expected: at least 1 and at most {self.length}, the length of the rows in training"
                )
        rewards = np.zeros(len(rows), np.float32)
        for batch in self._batches(rows):
            rewards[batch.indices] = self._run(batch)
        return rewards

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator["_RewardBatch"]:
        by_size: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            size = min(max(SHORTEST, 1 << (len(row) - 1).bit_length()), self.length)
            by_size.setdefault(size, []).append(i)
        for size, indices in by_size.items():
            count = max(1, self._batch_tokens // size)
            for start in range(0, len(indices), count):
                part = indices[start : start + count]
                tokens, weights = np.zeros((count, size), np.int32), np.zeros((count, size), np.float32)
                for row, i in enumerate(part):
                    tokens[row, : len(rows[i])], weights[row, : len(rows[i])] = rows[i], 1.0
                yield _RewardBatch(np.array(part), tokens, weights)

    def _run(self, batch: "_RewardBatch") -> np.ndarray:
        call = self._program.compile("reward", batch.tokens.shape)
        rewards = call(self._weights, batch.tokens, batch.weights, self._head)
        return np.asarray(rewards)[: len(batch.indices)]


@attrs.frozen(eq=False)
class _RewardBatch:
    """Rows of one padded length.

    Attributes:
        indices: Index of each row, int [N] with N <= R.
        tokens: int32 [R, S].
        weights: 1 for tokens, 0 for padding, float32 [R, S].
    """

    indices: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray


def _rewards(model: Any, tokens: jax.Array, weights: jax.Array, head: jax.Array) -> jax.Array:
    hidden, _ = model.hidden_states({"tokens": tokens, "weights": weights})
    return jnp.squeeze(last_hidden(hidden, weights).astype(jnp.float32) @ head, axis=-1)


def _inputs(rows: tuple[int, int], head: tuple[int, ...]) -> tuple[Array, ...]:
    return Array(rows, jnp.int32), Array(rows, jnp.float32), Array(head, jnp.float32)
