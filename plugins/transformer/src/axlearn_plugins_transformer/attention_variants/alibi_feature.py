"""The feature `alibi`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, map, node
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention_variants.alibi import Alibi

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseAlibi(Feature):
    """Linear biases on the attention scores (ALiBi) in the place of the position encoding of every attention layer.

    Whatever stands in `position`, a rotary embedding or nothing, is replaced; so it cannot be used together with `rope`.
    A layer that has ALiBi already stays as it is.
    """

    stage = "replace"
    excludes = ("rope",)

    def apply(self, cfg: Tree) -> Tree:
        """Sets `position` wherever a node has such a field for a position encoding."""
        count = 0

        def place(part: Node[Any]) -> Node[Any]:
            nonlocal count
            if not {"num_heads", "position"} <= {a.name for a in attrs.fields(type(part))}:
                return part
            count += 1
            is_alibi = isinstance(part.position, Alibi.Config)  # type: ignore[attr-defined]
            return part if is_alibi else attrs.evolve(part, position=Alibi.Config())

        result = map(cfg, place)
        if not count:
            raise ConfigError(
                Problem(
                    path="model",
                    message="alibi finds no attention to put a bias on",
                    expected="a node with `num_heads` and `position`",
                    fix="leave alibi out, or use an attention that has a `position` child",
                )
            )
        return result
