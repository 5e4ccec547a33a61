"""The feature `optimizer`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, node, patch
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_features.edit import component, given_fields, require_fields

Tree = TypeVar("Tree", bound=Node[Any])
RATE = "learning_rate"


@node
class UseOptimizer(Feature):
    """Trains with another optimizer.

    `component` is the name of a registered one (`lion`), or a mapping with its settings (`{type: lion, b1: 0.95}`). The
    learning rate, with its schedule, is that of the optimizer which stood there, unless the mapping gives one or one of
    the two optimizers has none; nothing else is taken over. On an experiment that has this optimizer already, the
    settings that are given are set, and the others stay.
    """

    stage = "replace"
    example = "component=lion"

    component: str | Node[Any] = REQUIRED

    def apply(self, cfg: Tree) -> Tree:
        """Sets `learner.optimizer`."""
        old = require_fields(cfg, "learner", ("optimizer",), feature="optimizer").optimizer
        wanted = component(self.component)
        given = given_fields(wanted)
        if type(old) is type(wanted):
            new = attrs.evolve(old, **given)
        elif RATE not in given and _has_rate(old) and _has_rate(wanted):
            new = attrs.evolve(wanted, **{RATE: getattr(old, RATE)})
        else:
            new = wanted
        return cfg if new == old else patch(cfg, {"learner.optimizer": new})

    def in_effect(self, cfg: Node[Any]) -> bool:
        """The optimizer stands there with these settings."""
        return self.apply(cfg) == cfg


def _has_rate(optimizer: Node[Any]) -> bool:
    return any(a.name == RATE for a in attrs.fields(type(optimizer)))
