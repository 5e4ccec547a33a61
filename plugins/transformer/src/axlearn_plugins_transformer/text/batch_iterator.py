"""The iterator whose position a checkpoint keeps."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.positions import is_current

Places = dict[str, list[int | list[int]]]
"""By shard, where each part of the data stands: the index of a record in the shard's order, or the records of the last row."""


MakeStreams = Callable[[bool], Mapping[tuple[int, ...], Any]]


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
        identify: (places, whether they are of the current order) -> what is read there, for messages.
        remake: makes the streams for positions of the current order (True), or of an older version's (False).
        check: raises `InputError` if a shard's position, of the current order, does not fit the data.
    """

    def __init__(
        self,
        streams: Mapping[tuple[int, ...], Any],
        *,
        workers: bool = False,
        identify: Callable[[Places, bool], dict[str, Any]] = lambda places, current: {},
        remake: MakeStreams | None = None,
        check: Callable[[Mapping[str, Any]], None] = lambda state: None,
    ):
        self._streams, self._workers, self._identify, self._check = dict(streams), workers, identify, check
        self._remake, self._current = remake, True
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
        if self._remake:
            self._use_order(all(is_current(shards[i]) for i in expected))
            for i in expected if self._current else ():
                self._check(shards[i])
        for ids, stream in self._streams.items():
            stream_state = {str(i): _restore_tuples(shards[str(i)]) for i in ids}
            if self._workers:
                stream_state = {**copy.deepcopy(stream.get_state()), "iterators_in_use_states": [stream_state]}
            stream.set_state(stream_state)
        self._count = state["batches"]
        self._shards = self._read()

    def _use_order(self, current: bool) -> None:
        assert self._remake is not None
        if current != self._current:
            _close(self._streams)
            self._streams.update(self._remake(current))
            self._current = current

    def describe_position(self) -> "Position":
        """The identity of the batch returned last."""
        identify, current = self._identify, self._current
        return Position(self._count, self._shards, lambda places: identify(places, current))

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
