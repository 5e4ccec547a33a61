"""The `freeze` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, node, patch
from axlearn_core.learn.learner import ParameterRule
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_tools.features.edit import require_fields

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Freeze(Feature):
    """Freezes the parameters that match a pattern.

    Frozen parameters are not updated and have no optimizer state. `pattern` is one pattern of dotted parameter paths,
    or a list of patterns: `decoder.embedding.**`, `[decoder.embedding.**, decoder.head.**]`. The run stops before its
    first step if a pattern matches no parameter, or if all parameters are frozen. If the experiment already has rules
    for the same pattern, they freeze too. All other rules stay.
    """

    stage = "tune"
    example = "pattern=decoder.embedding.**"

    pattern: str | tuple[str, ...] = REQUIRED

    def apply(self, cfg: Tree) -> Tree:
        """Add rules to `learner.rules`."""
        learner = require_fields(cfg, "learner", ("rules",), feature="freeze")
        rules: list[ParameterRule] = list(learner.rules)
        for pattern in (self.pattern,) if isinstance(self.pattern, str) else self.pattern:
            indices = [i for i, rule in enumerate(rules) if rule.pattern == pattern]
            for i in indices:
                rules[i] = attrs.evolve(rules[i], freeze=True)
            if not indices:
                rules.append(ParameterRule(pattern=pattern, freeze=True))
        return patch(cfg, {"learner.rules": tuple(rules)}) if tuple(rules) != learner.rules else cfg
