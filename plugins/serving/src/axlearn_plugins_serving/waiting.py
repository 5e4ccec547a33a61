"""The queue of requests that wait."""

import heapq
from collections import OrderedDict

from axlearn_plugins_serving.request_state import RequestState


class WaitingQueue:
    """By priority; within one, clients take turns; within one client's, in the order of arrival.

    No operation takes longer the more requests wait, but for the logarithm of the number of distinct priorities.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, OrderedDict[str, RequestState]]] = {}
        self._priorities: list[int] = []  # a heap; may hold priorities that have nobody any more
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, state: RequestState) -> bool:
        request = state.request
        return request.id in self._levels.get(request.priority, {}).get(request.client, ())

    def push(self, state: RequestState) -> None:
        """Puts a request behind those of its client."""
        self._client(state)[state.request.id] = state
        self._length += 1

    def push_front(self, state: RequestState) -> None:
        """Puts a request before all others of its priority: one that was begun before."""
        self.push(state)
        level = self._levels[state.request.priority]
        level[state.request.client].move_to_end(state.request.id, last=False)
        level.move_to_end(state.request.client, last=False)

    def first(self) -> RequestState | None:
        """The request whose turn it is; it stays."""
        while self._priorities:
            level = self._levels.get(self._priorities[0])
            if level:
                return next(iter(next(iter(level.values())).values()))
            heapq.heappop(self._priorities)
        return None

    def take(self, state: RequestState) -> None:
        """Removes the first request; its client's next turn comes after the other clients'."""
        level, client = self._levels[state.request.priority], state.request.client
        self.remove(state)
        if client in level:
            level.move_to_end(client)

    def remove(self, state: RequestState) -> None:
        """Removes a request from anywhere."""
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
