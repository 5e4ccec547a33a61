"""The `ema` feature."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node, patch, setting
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import require_fields

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Ema(Feature):
    """Keeps an exponential moving average of the parameters for evaluation and export.

    After each update, average = decay * average + (1 - decay) * parameters, in float32. If the experiment already keeps
    an average, this sets its decay.
    """

    stage = "tune"

    decay: float = setting(default=0.999, gt=0, lt=1)

    def apply(self, cfg: Tree) -> Tree:
        """Set `learner.ema_decay`."""
        require_fields(cfg, "learner", ("ema_decay",), feature="ema")
        return patch(cfg, {"learner.ema_decay": self.decay})
