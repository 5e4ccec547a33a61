"""The `alibi` feature."""

from typing import Any, TypeVar

from axlearn_core.config import Node, node
from axlearn_core.config.tree import fill_slots
from axlearn_core.errors import Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import PositionEncoding
from axlearn_plugins_transformer.attention_variants.alibi import Alibi

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseAlibi(Feature):
    """Replaces the position encoding of every attention layer with ALiBi.

    ALiBi adds linear biases to the scores. The feature replaces any encoding in `position`, so it cannot be combined
    with `rope`. Layers that already use ALiBi do not change.
    """

    stage = "replace"
    excludes = ("rope",)
    replaces = ("model.**.position",)

    def apply(self, cfg: Tree) -> Tree:
        """Put ALiBi into every position-encoding slot."""
        no_match = Problem(
            path="model",
            message="alibi finds no attention layer with a slot for a position encoding",
            expected="a layer with a slot `Node[PositionEncoding]`",
            fix="leave alibi out, or annotate the attention's slot as `Node[PositionEncoding]`",
        )
        return fill_slots(cfg, PositionEncoding, lambda _path, _old: Alibi.Config(), no_match=no_match)
