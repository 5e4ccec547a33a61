"""The feature `shadow`; `axlearn train --shadow FEATURE` is short for it."""

from typing import Any, TypeVar

from axlearn_core.config import REQUIRED, Node, node, patch, setting
from axlearn_core.config.tree import children
from axlearn_core.contracts.experiment import loop_of
from axlearn_core.errors import RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.loop import TrainLoop
from axlearn_plugins_runtime.shadow import ShadowCheck

Tree = TypeVar("Tree", bound=Node[Any])


@node
class ShadowFeature(Feature):
    """Computes some steps in another execution as well, and logs how far loss and gradients part, by layer and parameter.

    `feature` is what the other execution has besides, as `--with` takes it: `precision:dtype=bfloat16`. The run itself stays as it
    is, bit by bit. A compared step costs about three. Needs the loop of the core.
    """

    stage = "execute"
    example = "feature=remat,every_steps=2"

    feature: str = REQUIRED
    every_steps: int = setting(default=100, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Puts the check into the loop.

        Raises:
            RequestError: the loop has another check, or the config cannot have the other execution's feature.
        """
        loop = loop_of(cfg)
        if not isinstance(loop, TrainLoop.Config) or not isinstance(loop.check, ShadowCheck.Config | None):
            check = type(children(loop).get("check")).__qualname__
            got = f"loop {type(loop).__qualname__}, check {check}"
            raise RequestError(
                f"shadow is the check of the core's loop\n    got: {got}\n    expected: train-loop without a check, such as "
                "that of sdc-check\n    fix: leave one of them out"
            )
        resolve(cfg, with_=[self.feature])  # an unknown feature is an error before the run begins
        return patch(cfg, {"loop.check": ShadowCheck.Config(feature=self.feature, every_steps=self.every_steps)})

    def in_effect(self, cfg: Node[Any]) -> bool:
        """The loop has this check."""
        return self.apply(cfg) == cfg
