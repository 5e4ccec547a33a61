"""The `optimizer-precision` and `offload-optimizer` features."""

from typing import Any, Literal, TypeVar

from axlearn_core.config import Node, get, get_fields, node, patch
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn.learner import Learner
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_parallelism.placed_learner import PlacedLearner

Tree = TypeVar("Tree", bound=Node[Any])


def with_learner(cfg: Tree, feature: str, **settings: Any) -> Tree:
    """Return `cfg` with a `PlacedLearner` that has these settings. Raise `ConfigError` if the learner is of an unknown kind."""
    old = get(cfg, "learner")
    if type(old) not in (Learner.Config, PlacedLearner.Config):
        raise ConfigError(
            Problem(
                path="learner",
                message=f"{feature} does not support the learner {type(old).__qualname__}",
                expected="axlearn's Learner",
                fix=f"remove the feature {feature}",
            )
        )
    fields = get_fields(old)
    new = PlacedLearner.Config(**{**fields, **settings})
    return cfg if new == old else patch(cfg, {"learner": new})


@node
class OptimizerPrecision(Feature):
    """Storage dtype of the optimizer's moments, by default `bfloat16`.

    Updates are computed in the optimizer's usual dtype. In bfloat16, a second moment with `b2` above about 0.996, such as
    0.999, stops decreasing, because small relative changes are lost to rounding. If the experiment already has the feature, the
    dtype is replaced.
    """

    stage = "tune"

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def apply(self, cfg: Tree) -> Tree:
        """Set the learner's `state_dtype`."""
        return with_learner(cfg, "optimizer-precision", state_dtype=self.dtype)


@node
class OffloadOptimizer(Feature):
    """Offloading of the optimizer's moments to host memory between steps.

    Each update loads the moments onto the device and writes them back. The results do not change. If the experiment already has
    the feature, nothing changes.
    """

    stage = "execute"

    def apply(self, cfg: Tree) -> Tree:
        """Set the learner's `offload`."""
        return with_learner(cfg, "offload-optimizer", offload=True)
