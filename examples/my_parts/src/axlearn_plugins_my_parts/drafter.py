"""The `repeat-drafter` component."""

from collections.abc import Sequence

from axlearn_core.extend import Configurable, node
from axlearn_plugins_serving.request_state import RequestState


class RepeatDrafter(Configurable):
    """Drafts the last token again if it occurred twice in a row.

    This helps with runs of spaces, zeros or dashes.
    """

    @node
    class Config(Configurable.Config["RepeatDrafter"]):
        """Settings for `RepeatDrafter`. There are none."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """Return at most `most` draft tokens."""
        last = state.tokens[-2:]
        return last[1:] * most if len(last) == 2 and last[0] == last[1] else ()
