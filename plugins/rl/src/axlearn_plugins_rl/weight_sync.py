"""Weights of a training state for the engine in the same process."""

from typing import Any

from axlearn_core.config import Configurable, node
from axlearn_plugins_serving.local_engine import LocalEngine


class InProcessSync(Configurable):
    """Lets the engine read the given arrays. It copies only those whose layout differs. See `rollout_contracts.WeightSync`."""

    @node
    class Config(Configurable.Config["InProcessSync"]):
        """No settings."""

    def __init__(self, cfg: Config, *, engine: LocalEngine):
        self._engine = engine

    def push(self, weights: Any, version: int) -> int:
        """Use weights from now on, and return the number of bytes that were copied."""
        return self._engine.update_weights(weights, version, share=True)
