"""Compute a step of a run again, compare it with what the run recorded, and find what went wrong in it.

result = replay("runs/quickstart-1a2b3c4d", step=1200, bisect=True)
print(result.identical, result.bisection)
"""

from typing import TYPE_CHECKING

from axlearn_core.compat import lazy_names, make_callable

if TYPE_CHECKING:
    from axlearn_plugins_verify.replay.step_replay import Replay, replay

__all__ = ["Replay", "replay"]

_MODULES = {"Replay": "step_replay", "replay": "step_replay"}
__getattr__ = lazy_names(__name__, _MODULES)
make_callable(__name__)
