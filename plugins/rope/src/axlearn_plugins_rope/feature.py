"""The feature `rope`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, map, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_rope.scaling import Scaling
from axlearn_plugins_transformer.alternate import Alternate

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Rope(Feature):
    """Rotary position embeddings in every attention layer.

    Options that are given are set on the rotary embeddings that are already there; any other position encoding, or
    none, is replaced by a new rotary embedding. Where layers take turns with several (`alternate`), this holds for each of
    them. `theta` is the base of its frequencies (10000 on a new one), `scaling` a node such as
    `{type: yarn-rope-scaling, factor: 4, original_length: 4096}`.
    """

    stage = "replace"

    theta: float | None = setting(default=None, gt=1)
    scaling: Node[Scaling] | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Sets `position` wherever a node has such a field for a position encoding."""
        options = {k: v for k, v in (("theta", self.theta), ("scaling", self.scaling)) if v is not None}
        count = 0

        def rotary(old: Any) -> Node[Any]:
            if isinstance(old, Alternate):
                first, children = (tuple(rotary(kind) for kind in kinds) for kinds in (old.first, old.children))
                return attrs.evolve(old, first=first, children=children)
            return attrs.evolve(old if isinstance(old, RotaryEmbedding.Config) else RotaryEmbedding.Config(), **options)

        def place(part: Node[Any]) -> Node[Any]:
            nonlocal count
            if not _takes_position(part):
                return part
            count += 1
            old = part.position  # type: ignore[attr-defined]
            new = rotary(old)
            return part if new == old else attrs.evolve(part, position=new)

        result = map(cfg, place)
        if not count:
            raise ConfigError(
                Problem(
                    path="model",
                    message="rope finds no attention to put a position encoding in",
                    expected="a node with `num_heads` and `position`",
                    fix="leave rope out, or use an attention that has a `position` child",
                )
            )
        return result


def _takes_position(part: Node[Any]) -> bool:
    return {"num_heads", "position"} <= {a.name for a in attrs.fields(type(part))}
