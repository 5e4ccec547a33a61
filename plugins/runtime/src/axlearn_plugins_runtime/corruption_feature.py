"""The `sdc-check` feature."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node, patch, setting
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
        """Add the check to the loop."""
        loop = get_loop_config(cfg)
        if not isinstance(loop, TrainLoop.Config):
            raise RequestError(
                f"sdc-check requires the core's training loop\n    got: loop {type(loop).__qualname__}\n    expected: train-loop\n"
                "    fix: remove the feature, or set loop={type: train-loop}"
            )
        check = CorruptionCheck.Config(every_steps=self.every_steps, rerun=self.rerun, replicas=self.replicas)
        return patch(cfg, {"loop.check": check})
