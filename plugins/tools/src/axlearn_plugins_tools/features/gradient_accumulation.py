"""The `gradient-accumulation` feature."""

from typing import Any, TypeVar

from axlearn_core.config import REQUIRED, Node, node, patch, setting
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import require_fields

Tree = TypeVar("Tree", bound=Node[Any])


@node
class GradientAccumulation(Feature):
    """Splits the batch of each step into `steps` microbatches and runs them one at a time.

    The batch, the loss and the update do not change. Only the activations of one microbatch are in memory at a time.
    `steps` must divide the batch. If the experiment already accumulates gradients, `steps` replaces the old value.
    """

    stage = "execute"
    example = "steps=2"

    steps: int = setting(default=REQUIRED, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Set `learner.accumulate_steps`."""
        require_fields(cfg, "learner", ("accumulate_steps",), feature="gradient-accumulation")
        return patch(cfg, {"learner.accumulate_steps": self.steps})
