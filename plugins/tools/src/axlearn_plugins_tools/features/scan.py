"""The feature `scan`."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node
from axlearn_core.config.roles import StackRole
from axlearn_core.config.tree import set_fields
from axlearn_core.plugins.feature import Feature, nothing_to_set

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
        nothing = nothing_to_set("scan", "a stack of layers: a node with the role StackRole")
        return set_fields(cfg, StackRole, {"mode": mode}, nothing=nothing)
