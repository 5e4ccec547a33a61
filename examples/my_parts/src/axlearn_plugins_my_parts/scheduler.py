"""The `shortest-first` component."""

from typing import Any

import attrs

from axlearn_core.extend import node
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import PriorityScheduler


class ShortestFirst(PriorityScheduler):
    """Starts requests with short prompts first. Otherwise works like the default scheduler."""

    @node
    class Config(PriorityScheduler.Config):
        """Settings for `ShortestFirst`, as for `PriorityScheduler`."""

    def add(self, state: RequestState) -> None:
        """Add a request, with the length of its prompt as its priority."""
        request: Any = state.request
        state.request = attrs.evolve(request, priority=len(state.tokens))
        super().add(state)
