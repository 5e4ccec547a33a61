"""Compute a step of a run again, compare it with what the run recorded, and find what went wrong in it.

result = replay("runs/quickstart-1a2b3c4d", step=1200, bisect=True)
print(result.identical, result.bisection)
"""

from axlearn_core.compat import lazy_names

__all__ = ["Replay", "replay"]

_MODULES = {"Replay": "api", "replay": "api"}
__getattr__ = lazy_names(__name__, _MODULES)
