"""The batch iterator, whose position is saved in checkpoints."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.positions import is_current

Places = dict[str, list[int | list[int]]]
"""Shard -> place in each part of the data: the index of a record in the shard's order, or the records of the last row."""


Locate = Callable[[str, list[int | list[int]], np.ndarray], str]
"""(shard, place in each part, target tokens) -> file and place in it, or an empty string."""

MakeStreams = Callable[[bool], Mapping[tuple[int, ...], Any]]


@attrs.frozen
class Position:
    """The origin of a batch.

    Record names are looked up on access, which is slow for a large batch.
    """

    batch: int
    _shards: Mapping[str, Any]
    _identify: Callable[[Places], dict[str, Any]] = attrs.field(eq=False)
    _locate: Locate = attrs.field(eq=False, default=lambda shard, places, targets: "")

    def facts(self) -> dict[str, Any]:
        """Return the number of the batch, counting from 1, and the records in which its rows begin."""
        return {"batch": self.batch, **self._identify({i: _find_places(s) for i, s in self._shards.items()})}

    def __str__(self) -> str:
        return str(self.facts())

    def locate(self, batch: Mapping[str, np.ndarray], row: int, start: int, stop: int) -> str:
        """See `axlearn_core.contracts.capabilities.LocatesDocuments`."""
        shards = list(self._shards)
        shard = shards[row * len(shards) // len(batch["targets"])]
        return self._locate(shard, _find_places(self._shards[shard]), batch["targets"][row, start:stop])


class Batches:
    """A `BatchIterator` over Grain's iterators, with a state per virtual shard.

    A position can therefore be resumed with a different number of worker processes. It can also be resumed with a different
    number of processes, if the "shards" of all processes are merged into one mapping.

    Args:
        streams: Grain's iterators, keyed by the ids of their shards.
        workers: Whether each stream runs in a worker process.
        identify: (places, whether they are in the current order) -> facts about the data there, for messages.
        locate: Finds the source of some tokens, for positions in the current order.
        remake: Creates the streams for the current order (True) or the order of an older version (False).
        check: Raises InputError if a shard's position, in the current order, does not fit the data.
    """

    def __init__(
        self,
        streams: Mapping[tuple[int, ...], Any],
        *,
        workers: bool = False,
        identify: Callable[[Places, bool], dict[str, Any]] = lambda places, current: {},
        locate: Locate = lambda shard, places, targets: "",
        remake: MakeStreams | None = None,
        check: Callable[[Mapping[str, Any]], None] = lambda state: None,
    ):
        self._streams, self._workers, self._identify, self._check = dict(streams), workers, identify, check
        self._remake, self._current, self._locate = remake, True, locate
        self._count = 0
        self._shards = self._read()
        # Stop Grain's threads and processes even if nobody calls `close`, and before Python unloads modules.
        self._finalize = weakref.finalize(self, _close, self._streams)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the next batch of this process's rows."""
        if not self._streams:
            raise StopIteration
        try:
            for stream in self._streams.values() if self._workers else ():
                stream.ask()  # let all workers read in parallel
            batches = [next(stream) for stream in self._streams.values()]
        except StopIteration:
            self.close()
            raise
        self._count += 1
        self._shards = self._read()
        return batches[0] if len(batches) == 1 else {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last returned batch.

        It is JSON data: {"batches": n, "shards": {id: state}}.
        """
        return {"batches": self._count, "shards": self._shards}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `get_state` returned.

        Raise InputError if it belongs to a different pipeline.
        """
        shards = state["shards"]
        expected = {str(i) for ids in self._streams for i in ids}
        if not expected <= set(shards):
            raise InputError(
                f"the saved data position has the shards {', '.join(sorted(shards))}, but this process needs "
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
        """Return the origin of the last returned batch."""
        identify, current = self._identify, self._current
        locate = {"locate": self._locate} if current else {}
        return Position(self._count, self._shards, lambda places: identify(places, current), **locate)

    def close(self) -> None:
        """Stop worker processes and threads."""
        self._finalize()

    def _read(self) -> dict[str, Any]:
        states = [stream.get_state() for stream in self._streams.values()]
        if self._workers:  # unwrap the state of each stream's only worker
            states = [s["iterators_in_use_states"][0] for s in states]
        return {i: state for streams in states for i, state in streams.items()}


def _close(streams: dict[tuple[int, ...], Any]) -> None:
    while streams:
        streams.popitem()[1].close()


def _restore_tuples(state: Any) -> Any:
    """Convert lists back to tuples in a state that was loaded from JSON.

    Grain compares these positions as tuples.
    """
    if isinstance(state, Mapping):
        return {
            k: {n: tuple(v) for n, v in below.items()} if k == "remainder_slices" else _restore_tuples(below)
            for k, below in state.items()
        }
    return [_restore_tuples(s) for s in state] if isinstance(state, (list, tuple)) else state


def _find_places(state: Any) -> list[int | list[int]]:
    """Return the place in each part of the data, in part order."""
    if isinstance(state, Mapping):
        if "next_index" in state or "records" in state:
            return [state["next_index"] if "next_index" in state else state["records"]]
        state = list(state.values())
    return [i for below in state for i in _find_places(below)] if isinstance(state, (list, tuple)) else []
