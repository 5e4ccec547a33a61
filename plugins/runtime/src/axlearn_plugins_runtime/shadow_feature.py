"""The feature `shadow`, and `axlearn train --shadow` which asks for it."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, node, patch, setting
from axlearn_core.errors import RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.request import FeatureUse
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
        """Puts the check into the loop."""
        loop = getattr(cfg, "loop", None)
        if not isinstance(loop, TrainLoop.Config) or not isinstance(loop.check, ShadowCheck.Config | None):
            got = f"loop {type(loop).__qualname__}, check {type(getattr(loop, 'check', None)).__qualname__}"
            raise RequestError(
                f"shadow is the check of the core's loop\n    got: {got}\n    expected: train-loop without a check, such as "
                "that of sdc-check\n    fix: leave one of them out"
            )
        return patch(cfg, {"loop.check": ShadowCheck.Config(feature=self.feature, every_steps=self.every_steps)})

    def in_effect(self, cfg: Node[Any]) -> bool:
        """The loop has this check."""
        return self.apply(cfg) == cfg


def train(feature: str, *, request: Any, every: str | None = None, **options: Any) -> None:
    """`axlearn train --shadow FEATURE [--every STEPS]`.

    Args:
        feature: the value of `--shadow`.
        request: what is trained.
        every: the value of `--every`.
        options: those of `axlearn train`.
    """
    from axlearn_core.cli.train import run_training
    from axlearn_core.plugins.resolve import resolve

    if every is not None and (not every.isdecimal() or int(every) < 1):
        raise RequestError(f"--every takes a number of steps\n    got: {every!r}")
    resolve(request.experiment, with_=[*(f.text for f in request.features), feature])  # before anything begins
    steps = {} if every is None else {"every_steps": int(every)}
    use = FeatureUse(name="shadow", options={"feature": feature, **steps}, location="--shadow")
    run_training(attrs.evolve(request, features=(*request.features, use)), **options)
