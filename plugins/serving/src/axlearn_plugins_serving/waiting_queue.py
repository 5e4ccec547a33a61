"""The queue of waiting requests."""

import heapq
from collections import OrderedDict

from axlearn_plugins_serving.request_state import RequestState


class WaitingQueue:
    """A queue ordered by priority, then by the clients' turns, then by arrival.

    The cost of each operation is logarithmic in the number of distinct priorities.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, OrderedDict[str, RequestState]]] = {}
        self._priorities: list[int] = []  # a heap; may contain priorities without requests
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, state: RequestState) -> bool:
        request = state.request
        return request.id in self._levels.get(request.priority, {}).get(request.client, ())

    def push(self, state: RequestState) -> None:
        """Add a request after its client's other requests."""
        self._client(state)[state.request.id] = state
        self._length += 1

    def push_front(self, state: RequestState) -> None:
        """Add a preempted request before all other requests with its priority."""
        self.push(state)
        level = self._levels[state.request.priority]
        level[state.request.client].move_to_end(state.request.id, last=False)
        level.move_to_end(state.request.client, last=False)

    def first(self) -> RequestState | None:
        """Return the next request without removing it, or None."""
        while self._priorities:
            level = self._levels.get(self._priorities[0])
            if level:
                return next(iter(next(iter(level.values())).values()))
            heapq.heappop(self._priorities)
        return None

    def take(self, state: RequestState) -> None:
        """Remove the first request and move its client to the end of the rotation."""
        level, client = self._levels[state.request.priority], state.request.client
        self.remove(state)
        if client in level:
            level.move_to_end(client)

    def remove(self, state: RequestState) -> None:
        """Remove a request from any position."""
        request = state.request
        level = self._levels[request.priority]
        queue = level[request.client]
        del queue[request.id]
        if not queue:
            del level[request.client]
        if not level:
            del self._levels[request.priority]
        self._length -= 1

    def _client(self, state: RequestState) -> OrderedDict[str, RequestState]:
        request = state.request
        if request.priority not in self._levels:
            self._levels[request.priority] = OrderedDict()
            heapq.heappush(self._priorities, request.priority)
        return self._levels[request.priority].setdefault(request.client, OrderedDict())
