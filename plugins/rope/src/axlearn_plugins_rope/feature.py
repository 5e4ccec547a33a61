"""The `rope` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, node, setting
from axlearn_core.config.tree import fill_slots
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.errors import Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_rope.scaling import Scaling
from axlearn_plugins_transformer.attention import PositionEncoding

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Rope(Feature):
    """Puts rotary position embeddings into every attention layer.

    The feature sets the given options on existing rotary embeddings. It replaces any other position encoding with a new
    rotary embedding, and also fills empty slots. If a slot alternates between several encodings
    (`alternate`), the feature changes each of them. Layers to which an `alternate` gives no encoding stay without one.

    Attributes:
        theta: Base of the frequencies (10000 for a new embedding).
        scaling: Length scaling, such as `{type: yarn-rope-scaling, factor: 4, original_length: 4096}`.
        fraction: Fraction of each head that is rotated (1 for a new embedding).
    """

    stage = "replace"
    replaces = ("model.**.position",)

    theta: float | None = setting(default=None, gt=1)
    scaling: Node[Scaling] | None = None
    fraction: float | None = setting(default=None, gt=0, le=1)

    def apply(self, cfg: Tree) -> Tree:
        """Put a rotary embedding into every position-encoding slot."""
        options = {"theta": self.theta, "scaling": self.scaling, "fraction": self.fraction}
        options = {name: value for name, value in options.items() if value is not None}

        def set_rotary(old: Any) -> Node[Any]:
            return attrs.evolve(old if isinstance(old, RotaryEmbedding.Config) else RotaryEmbedding.Config(), **options)

        no_match = Problem(
            path="model",
            message="rope finds no attention layer with a slot for a position encoding",
            expected="a layer with a slot `Node[PositionEncoding]`",
            fix="leave rope out, or annotate the attention's slot as `Node[PositionEncoding]`",
        )
        return fill_slots(cfg, PositionEncoding, lambda _, old: edit_innermost(old, set_rotary), no_match=no_match)
