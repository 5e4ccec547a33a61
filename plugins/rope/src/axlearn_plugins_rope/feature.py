"""The feature `rope`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, node, setting
from axlearn_core.config.tree import fill_slots
from axlearn_core.errors import Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_rope.scaling import Scaling
from axlearn_plugins_transformer.alternate import change_slot
from axlearn_plugins_transformer.attention import PositionEncoding

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
        """Fills every slot for a position encoding."""
        options = {k: v for k, v in (("theta", self.theta), ("scaling", self.scaling)) if v is not None}

        def rotary(old: Any) -> Node[Any]:
            return attrs.evolve(old if isinstance(old, RotaryEmbedding.Config) else RotaryEmbedding.Config(), **options)

        nothing = Problem(
            path="model",
            message="rope finds no attention to put a position encoding in",
            expected="a layer with a slot `Node[PositionEncoding]`",
            fix="leave rope out, or annotate the attention's slot for position encodings so",
        )
        return fill_slots(cfg, PositionEncoding, lambda _, old: change_slot(old, rotary), nothing=nothing)
