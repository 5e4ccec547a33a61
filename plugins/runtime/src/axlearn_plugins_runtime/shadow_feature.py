"""The `shadow` feature, also available as `axlearn train --shadow FEATURE`."""

from typing import Any, TypeVar

from axlearn_core.config import REQUIRED, Node, node, setting
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_runtime.corruption_feature import add_step_check
from axlearn_plugins_runtime.shadow import ShadowCheck

Tree = TypeVar("Tree", bound=Node[Any])


@node
class ShadowFeature(Feature):
    """Computes every N-th step a second time with an additional feature, and logs how far loss and gradients diverge.

    `feature` is the feature of the second execution, as for `--with`: `precision:dtype=bfloat16`. The divergence is logged by
    layer and parameter. The run itself stays bitwise identical. A compared step takes about as long as three steps. Requires
    the core's training loop.
    """

    stage = "execute"
    example = "feature=remat,every_steps=2"

    feature: str = REQUIRED
    every_steps: int = setting(default=100, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Add the check to the loop.

        Raises:
            RequestError: The loop already has a different check, or the feature cannot be applied to the config.
        """
        result = add_step_check(cfg, ShadowCheck.Config(feature=self.feature, every_steps=self.every_steps), "shadow")
        resolve(cfg, with_=[self.feature])  # raises before the run starts if the feature is unknown
        return result

    def in_effect(self, cfg: Node[Any]) -> bool:
        """Return True if the loop has this check."""
        return self.apply(cfg) == cfg
