"""The `confidence-penalty` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.extend import Feature, ModelLoss, Node, children, node, patch, setting
from axlearn_plugins_my_objective.objective import ConfidencePenalty

Tree = TypeVar("Tree", bound=Node[Any])


@node
class PenalizeConfidence(Feature):
    """Adds a penalty on confident predictions to the objective.

    If the objective already has the penalty, this sets its `weight`.
    """

    stage = "wrap"
    weight: float = setting(default=0.1, ge=0)

    def apply(self, cfg: Tree) -> Tree:
        """Wrap the objective of the config."""
        old = children(cfg).get("objective")
        if isinstance(old, ConfidencePenalty.Config):
            return patch(cfg, {"objective": attrs.evolve(old, weight=self.weight)})
        base = ModelLoss.Config() if old is None else old
        return patch(cfg, {"objective": ConfidencePenalty.Config(weight=self.weight, base=base)})
