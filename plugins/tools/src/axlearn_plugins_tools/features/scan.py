"""The feature `scan`."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import set_fields

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Scan(Feature):
    """Runs stacks of layers by a scan, or with `on=false` unrolled.

    A scan compiles one layer, regardless of their number; unrolled, the compiler sees all of them, which takes longer and is
    often faster on CPU. Numbers and checkpoints are the same. A stack that is in this mode already stays as it is.
    """

    stage = "execute"

    on: bool = True

    def apply(self, cfg: Tree) -> Tree:
        """Sets `mode` of every stack."""
        mode = "scan" if self.on else "unrolled"
        needs = "a stack of layers: a node with `mode` and `remat`"
        return set_fields(cfg, frozenset({"mode", "remat"}), {"mode": mode}, feature="scan", needs=needs)
