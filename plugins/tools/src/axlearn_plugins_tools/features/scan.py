"""The `scan` feature."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node
from axlearn_core.config.roles import StackRole
from axlearn_core.config.tree import set_fields
from axlearn_core.plugins.feature import Feature, no_match_problem

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Scan(Feature):
    """Runs stacks of layers in a scan, or unrolled with `on=false`.

    A scan compiles one layer, regardless of the number of layers. If the stack is unrolled, the compiler sees every
    layer. That takes longer to compile and is often faster on CPU. Results and checkpoints are the same. Stacks that
    already use this mode do not change.
    """

    stage = "execute"

    on: bool = True

    def apply(self, cfg: Tree) -> Tree:
        """Set `mode` on every stack."""
        mode = "scan" if self.on else "unrolled"
        problem = no_match_problem("scan", "a stack of layers: a node with the role StackRole")
        return set_fields(cfg, StackRole, {"mode": mode}, no_match=problem)
