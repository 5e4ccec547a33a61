"""The `sdc-check` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, node, patch, setting
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.contracts.experiment import get_loop_config
from axlearn_core.errors import RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_core.train.loop import TrainLoop
from axlearn_plugins_runtime.corruption import CorruptionCheck

Tree = TypeVar("Tree", bound=Node[Any])


@node
class CorruptionFeature(Feature):
    """Detects silent data corruption: computes every N-th step twice and compares the replicas on all devices.

    A checked step takes about as long as two steps, and needs memory for a second training state on the devices.
    `rerun=false` only compares replicas. Requires the core's training loop.
    """

    stage = "execute"
    example = "every_steps=2"

    every_steps: int = setting(default=100, ge=1)
    rerun: bool = True
    replicas: bool = True

    def apply(self, cfg: Tree) -> Tree:
        """Add the check to the loop. Raise `RequestError` if the loop already has a different one."""
        check = CorruptionCheck.Config(every_steps=self.every_steps, rerun=self.rerun, replicas=self.replicas)
        return add_step_check(cfg, check, "sdc-check")


def add_step_check(cfg: Tree, check: Node[Any], feature: str) -> Tree:
    """Return the config with a check in its training loop, also if another loop wraps that loop.

    A check of the same class is replaced.

    Raises:
        RequestError: The loop is not the core's, or it has a different check.
    """

    def add(loop: Any) -> Any:
        if not isinstance(loop, TrainLoop.Config):
            raise RequestError(
                f"{feature} requires the core's training loop\n    got: loop {type(loop).__qualname__}\n    expected: train-loop\n"
                f"    fix: remove {feature}, or set loop={{type: train-loop}}"
            )
        if not isinstance(loop.check, type(check) | None):
            raise RequestError(
                f"{feature} adds a check to the training loop, which can have only one\n"
                f"    got: check {type(loop.check).__qualname__}\n    expected: train-loop without a check\n"
                f"    fix: remove {feature}, or the feature that adds the other check, such as shadow or sdc-check"
            )
        return attrs.evolve(loop, check=check)

    return patch(cfg, {"loop": edit_innermost(get_loop_config(cfg), add)})
