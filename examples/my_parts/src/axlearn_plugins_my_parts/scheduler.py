"""The component `shortest-first`."""

from typing import Any

import attrs

from axlearn_core.extend import node
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import PriorityScheduler


class ShortestFirst(PriorityScheduler):
    """Begins requests with short prompts first; the default scheduler does the rest."""

    @node
    class Config(PriorityScheduler.Config):
        """As its base."""

    def add(self, state: RequestState) -> None:
        """Takes a request; its priority is the length of its prompt."""
        request: Any = state.request
        state.request = attrs.evolve(request, priority=len(state.tokens))
        super().add(state)
