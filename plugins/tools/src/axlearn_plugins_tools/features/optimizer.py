"""The `optimizer` feature."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, get_fields, node, patch
from axlearn_core.errors import Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import component, component_problems, require_fields

Tree = TypeVar("Tree", bound=Node[Any])
RATE = "learning_rate"


@node
class UseOptimizer(Feature):
    """Trains with a different optimizer.

    `component` is the name of a registered optimizer (`lion`). `settings` are its settings (`{b1: 0.95}`). The learning rate and
    its schedule are copied from the old optimizer, unless the settings contain a learning rate or one of the two optimizers does
    not have one. No other setting is copied. If the experiment already uses this optimizer, only the given settings change.
    """

    stage = "replace"
    replaces = ("learner.optimizer",)
    example = "component=lion"

    component: str = REQUIRED
    settings: Mapping[str, Any] = {}

    def validate(self) -> Iterable[Problem]:
        """Check that the component exists and has the given settings."""
        yield from component_problems(self.component, self.settings)

    def apply(self, cfg: Tree) -> Tree:
        """Set `learner.optimizer`."""
        old = require_fields(cfg, "learner", ("optimizer",), feature="optimizer").optimizer
        new, settings = component(self.component, self.settings)
        if type(old) is type(new):
            new = attrs.evolve(old, **settings)
        elif RATE not in settings and _has_rate(old) and _has_rate(new):
            new = attrs.evolve(new, **{RATE: get_fields(old)[RATE]})
        return cfg if new == old else patch(cfg, {"learner.optimizer": new})


def _has_rate(optimizer: Node[Any]) -> bool:
    return any(a.name == RATE for a in attrs.fields(type(optimizer)))
