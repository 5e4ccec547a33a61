"""Batches that were read ahead when the input fails."""

import pytest

from axlearn_plugins_runtime.job.input_failure import DEPTH, LookAhead


class Numbers:
    """0, 1, 2, ...; fails at `bad`."""

    def __init__(self, bad=-1):
        self.next, self.bad = 0, bad

    def __next__(self):
        if self.next == self.bad:
            raise ValueError(f"{self.bad} is bad")
        self.next += 1
        return self.next - 1

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state

    def describe_position(self):
        return f"number {self.next - 1}"

    def close(self):
        pass


def test_the_state_and_the_position_are_those_of_the_batch_taken_last():
    numbers = Numbers()
    ahead = LookAhead(numbers, 10, pytest.fail)
    assert ahead.get_state() == 0
    assert [next(ahead), next(ahead)] == [0, 1]
    assert (ahead.get_state(), ahead.describe_position()) == (2, "number 1")
    assert numbers.next == 2 + DEPTH - 1
    ahead.set_state(7)
    assert next(ahead) == 7


def test_no_more_is_read_than_is_wanted():
    numbers = Numbers(bad=5)
    ahead = LookAhead(numbers, 5, pytest.fail)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(ahead)
    assert numbers.next == 5


def test_a_failure_is_told_once_while_enough_batches_are_left():
    messages = []
    ahead = LookAhead(Numbers(bad=6), 100, messages.append)
    taken = []
    while not messages:
        taken.append(next(ahead))
    left = [next(ahead) for _ in range(DEPTH - 2)]
    assert [*taken, *left] == [0, 1, 2, 3, 4, 5]
    assert len(taken) == 6 - DEPTH + 2
    with pytest.raises(ValueError, match="6 is bad"):
        next(ahead)
    assert len(messages) == 1


def test_a_failure_before_the_first_batch_is_only_raised():
    with pytest.raises(ValueError, match="0 is bad"):
        next(LookAhead(Numbers(bad=0), 100, pytest.fail))
