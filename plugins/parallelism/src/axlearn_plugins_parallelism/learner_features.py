"""The features `optimizer-precision` and `offload-optimizer`."""

from typing import Any, Literal, TypeVar

from axlearn_core.config import Node, fields_of, get, node, patch
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn.learner import Learner
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_parallelism.placed_learner import PlacedLearner

Tree = TypeVar("Tree", bound=Node[Any])


def with_learner(cfg: Tree, feature: str, **settings: Any) -> Tree:
    """`cfg` with a `PlacedLearner` of these settings; raises `ConfigError` where another learner stands there."""
    old = get(cfg, "learner")
    if type(old) not in (Learner.Config, PlacedLearner.Config):
        raise ConfigError(
            Problem(
                path="learner",
                message=f"{feature} does not know {type(old).__qualname__}",
                expected="axlearn's own learner",
                fix=f"leave the feature {feature} out",
            )
        )
    fields = fields_of(old)
    new = PlacedLearner.Config(**{**fields, **settings})
    return cfg if new == old else patch(cfg, {"learner": new})


@node
class OptimizerPrecision(Feature):
    """Stores what the optimizer keeps of each parameter (its moments) in another dtype, by default `bfloat16`.

    Updates are computed in the dtype that the optimizer itself would use. In bfloat16 a second moment whose decay is slower
    than about 0.99 stands still, because its steps round to nothing: keep `b2` below that. On an experiment that has it
    already, the dtype is set anew.
    """

    stage = "tune"

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def apply(self, cfg: Tree) -> Tree:
        """Sets the learner's `state_dtype`."""
        return with_learner(cfg, "optimizer-precision", state_dtype=self.dtype)


@node
class OffloadOptimizer(Feature):
    """Keeps what the optimizer keeps of each parameter (its moments) in the host's memory between steps.

    They are read into the device's memory for each update and written back. The numbers are the same. On an experiment that
    has it already, nothing changes.
    """

    stage = "execute"

    def apply(self, cfg: Tree) -> Tree:
        """Sets the learner's `offload`."""
        return with_learner(cfg, "offload-optimizer", offload=True)
