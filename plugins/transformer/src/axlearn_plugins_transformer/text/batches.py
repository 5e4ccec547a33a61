"""The iterator whose position a checkpoint keeps."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_core.errors import InputError

Places = dict[str, list[int | list[int]]]
"""By shard, where each part of the data stands: the index of a record in the shard's order, or the records of the last row."""


@attrs.frozen
class Position:
    """Where a batch came from. Names are looked up when they are asked for: for a large batch that takes long."""

    batch: int
    _shards: Mapping[str, Any]
    _identify: Callable[[Places], dict[str, Any]] = attrs.field(eq=False)

    def facts(self) -> dict[str, Any]:
        """The number of the batch from 1, and the records that its rows begin in."""
        return {"batch": self.batch, **self._identify({i: _places(s) for i, s in self._shards.items()})}

    def __str__(self) -> str:
        return str(self.facts())


class Batches:
    """A `BatchIterator` over Grain's iterators, whose state is kept by virtual shard.

    So a position can be resumed with another number of worker processes; positions of several processes, their "shards"
    put into one mapping, with another number of processes.

    Args:
        streams: Grain's iterators, each with the ids of its shards.
        workers: whether each stream runs in a worker process.
        identify: names what is read at a position, for messages.
        read: (state, shard) -> the shard's position; takes those of older versions, or raises `InputError`.
    """

    def __init__(
        self,
        streams: Mapping[tuple[int, ...], Any],
        *,
        workers: bool = False,
        identify: Callable[[Places], dict[str, Any]] = lambda places: {},
        read: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = lambda state, shard: state,
    ):
        self._streams, self._workers, self._identify, self._read_position = dict(streams), workers, identify, read
        self._count = 0
        self._shards = self._read()
        # Grain's threads and processes end also where nobody closes them, and before Python takes modules apart.
        self._finalize = weakref.finalize(self, _close, self._streams)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch of this process's rows."""
        if not self._streams:
            raise StopIteration
        try:
            for stream in self._streams.values() if self._workers else ():
                stream.ask()  # all workers start, and read, side by side
            got = [next(stream) for stream in self._streams.values()]
        except StopIteration:
            self.close()
            raise
        self._count += 1
        self._shards = self._read()
        return got[0] if len(got) == 1 else {k: np.concatenate([g[k] for g in got]) for k in got[0]}

    def get_state(self) -> dict[str, Any]:
        """The position after the batch returned last, as JSON-able data: {"batches": n, "shards": {id: state}}."""
        return {"batches": self._count, "shards": self._shards}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that `get_state` gave; raises `InputError` where it is one of another pipeline."""
        shards = state["shards"]
        expected = {str(i) for ids in self._streams for i in ids}
        if not expected <= set(shards):
            raise InputError(
                f"the saved data position has the shards {', '.join(sorted(shards))}; this process needs "
                f"{', '.join(sorted(expected))}\n    fix: resume with the same num_shards and batch size"
            )
        for ids, stream in self._streams.items():
            stream_state = {str(i): self._read_position(_restore_tuples(shards[str(i)]), i) for i in ids}
            if self._workers:
                stream_state = {**copy.deepcopy(stream.get_state()), "iterators_in_use_states": [stream_state]}
            stream.set_state(stream_state)
        self._count = state["batches"]
        self._shards = self._read()

    def describe_position(self) -> "Position":
        """The identity of the batch returned last."""
        return Position(self._count, self._shards, self._identify)

    def close(self) -> None:
        """Ends worker processes and threads."""
        self._finalize()

    def _read(self) -> dict[str, Any]:
        states = [stream.get_state() for stream in self._streams.values()]
        if self._workers:  # what Grain wraps around the one worker of each stream
            states = [s["iterators_in_use_states"][0] for s in states]
        return {i: state for streams in states for i, state in streams.items()}


def _close(streams: dict[tuple[int, ...], Any]) -> None:
    while streams:
        streams.popitem()[1].close()


def _restore_tuples(state: Any) -> Any:
    """A state that went through JSON: Grain tells positions apart by tuples, which came back as lists."""
    if isinstance(state, Mapping):
        return {
            k: {n: tuple(v) for n, v in below.items()} if k == "remainder_slices" else _restore_tuples(below)
            for k, below in state.items()
        }
    return [_restore_tuples(s) for s in state] if isinstance(state, (list, tuple)) else state


def _places(state: Any) -> list[int | list[int]]:
    """Where each part of the data stands, in the order of the parts."""
    if isinstance(state, Mapping):
        if "next_index" in state or "records" in state:
            return [state["next_index"] if "next_index" in state else state["records"]]
        state = list(state.values())
    return [i for below in state for i in _places(below)] if isinstance(state, (list, tuple)) else []
