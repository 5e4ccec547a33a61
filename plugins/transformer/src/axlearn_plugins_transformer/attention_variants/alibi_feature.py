"""The feature `alibi`."""

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
    """Linear biases on the attention scores (ALiBi) in the place of the position encoding of every attention layer.

    Whatever stands in `position`, a rotary embedding or nothing, is replaced; so it cannot be used together with `rope`.
    A layer that has ALiBi already stays as it is.
    """

    stage = "replace"
    excludes = ("rope",)

    def apply(self, cfg: Tree) -> Tree:
        """Fills every slot for a position encoding."""
        nothing = Problem(
            path="model",
            message="alibi finds no attention to put a bias on",
            expected="a layer with a slot `Node[PositionEncoding]`",
            fix="leave alibi out, or annotate the attention's slot for position encodings so",
        )
        return fill_slots(cfg, PositionEncoding, lambda _path, _old: Alibi.Config(), nothing=nothing)
