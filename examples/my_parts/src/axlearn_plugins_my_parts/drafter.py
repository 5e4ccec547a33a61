"""The component `repeat-drafter`."""

from collections.abc import Sequence

from axlearn_core.extend import Configurable, node
from axlearn_plugins_serving.request_state import RequestState


class RepeatDrafter(Configurable):
    """Guesses that the last token comes again, where it has just come twice: runs of spaces, zeros, dashes."""

    @node
    class Config(Configurable.Config["RepeatDrafter"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """At most `most` tokens."""
        last = state.tokens[-2:]
        return last[1:] * most if len(last) == 2 and last[0] == last[1] else ()
