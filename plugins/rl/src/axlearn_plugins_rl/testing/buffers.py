"""Suite for buffers."""

import json
from typing import Any

import attrs
import numpy as np
import pytest

from axlearn_core.checkpoint.json_arrays import decode_arrays, encode_arrays
from axlearn_core.config import Node
from axlearn_plugins_rl.rollout_contracts import Buffer, Example, Group, Score
from axlearn_plugins_rl.testing.rollouts import answer_rollout

FAR = 100_000


class BufferSuite:
    """Tests that every buffer must pass.

    Attributes:
        config: Config of the buffer.
        ahead: Maximum age of the weights that the config allows, in steps.
    """

    config: Node[Any]
    ahead: int

    def buffer(self) -> Buffer:
        """Build the buffer, as a loop does."""
        return self.config.build()

    def test_ages_are_bounded(self) -> None:
        buffer = self.buffer()
        for number in (0, 1, 5, 77):
            versions = [version for version in range(number + 3) if buffer.admits(number, version)]
            oldest = max(0, number - self.ahead)
            assert versions == [*range(oldest, number + 1)], (
                f"the buffer admits the versions {versions} for batch {number}\n    expected: {oldest} to {number}"
            )
        assert not buffer.admits(FAR, 0)

    def test_batches_are_taken_as_they_were_put(self) -> None:
        buffer = self.buffer()
        numbers = range(7, 7 + self.ahead + 1)
        for number in reversed(numbers):
            buffer.put(number, batch_of(number))
        assert [*buffer.numbers()] == [*numbers]
        for number in numbers:
            assert flatten(buffer.take(number)) == flatten(batch_of(number))
        assert [*buffer.numbers()] == []

    def test_a_batch_can_be_taken_once(self) -> None:
        buffer = self.buffer()
        buffer.put(0, batch_of(0))
        buffer.take(0)
        for number in (0, 1):
            with pytest.raises(KeyError):
                buffer.take(number)

    def test_state_restores_the_batches(self) -> None:
        buffer, restored = self.buffer(), self.buffer()
        numbers = range(3, 3 + self.ahead + 1)
        for number in numbers:
            buffer.put(number, batch_of(number))
        state = through_checkpoint(buffer.get_state())
        buffer.take(3)
        restored.put(99, batch_of(99))
        restored.set_state(state)
        assert [*restored.numbers()] == [*numbers], (
            "a restored buffer must hold the batches of the state, and no others"
        )
        for number in numbers:
            assert flatten(restored.take(number)) == flatten(batch_of(number))

    def test_an_empty_buffer_has_a_state(self) -> None:
        buffer = self.buffer()
        buffer.put(0, batch_of(0))
        buffer.set_state(through_checkpoint(self.buffer().get_state()))
        assert [*buffer.numbers()] == []


def batch_of(number: int) -> tuple[Group, ...]:
    """Return a batch whose groups use all fields of rollouts and scores."""
    chat = Example(
        id=f"chat-{number}",
        prompt=({"role": "user", "content": "2 + 2?"},),
        answer={"sum": [4, None]},
        tools=({"type": "function", "function": {"name": "add"}},),
    )
    text = Example(id=f"text-{number}", prompt="2 + 2 = ", answer="4")
    rollouts = (
        answer_rollout(text, "4", seed=number),
        answer_rollout(text, "\ud800é\n", num_drawn=0, finish="length", metrics={"turns": 2.0}),
    )
    failed = answer_rollout(
        chat, "", finish="error", error="no tool", trajectories=(), messages=({"role": "assistant", "content": ""},)
    )
    scores = (Score(value=1.0 / 3, parts={"exact": 1.0}, metrics={"words": 3.0}), Score(value=0.0))
    return (
        Group(example=text, rollouts=rollouts, scores=scores),
        Group(example=chat, rollouts=(failed,), scores=(Score(value=0.0, error="the rollout failed: no tool"),)),
    )


def flatten(groups: Any) -> Any:
    """Return groups as values that can be compared with `==`."""

    def convert(_object: Any, _attribute: Any, value: Any) -> Any:
        return (value.tolist(), value.dtype.str) if isinstance(value, np.ndarray) else value

    return [attrs.asdict(group, value_serializer=convert) for group in groups]


def through_checkpoint(state: Any) -> Any:
    """Return a state as a checkpoint restores it."""
    return decode_arrays(json.loads(json.dumps(encode_arrays(state))))
