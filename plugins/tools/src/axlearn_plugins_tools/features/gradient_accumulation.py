"""The feature `gradient-accumulation`."""

from typing import Any, TypeVar

from axlearn_core.config import REQUIRED, Node, node, patch, setting
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import require_fields

Tree = TypeVar("Tree", bound=Node[Any])


@node
class GradientAccumulation(Feature):
    """Takes the batch of each step in `steps` microbatches, one after the other.

    The batch, the loss and the update stay what they are; the activations of one microbatch are held at a time. `steps`
    has to divide the batch. On an experiment that accumulates already, `steps` replaces its number.
    """

    stage = "execute"
    example = "steps=2"

    steps: int = setting(default=REQUIRED, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Sets `learner.accumulate_steps`."""
        require_fields(cfg, "learner", ("accumulate_steps",), feature="gradient-accumulation")
        return patch(cfg, {"learner.accumulate_steps": self.steps})
