"""The `gated-attention` feature."""

from typing import Any, TypeVar

from axlearn_core.extend import Feature, Node, node, replace_config
from axlearn_plugins_my_attention.layer import GatedAttention
from axlearn_plugins_transformer.attention import Attention

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseGatedAttention(Feature):
    """Adds a gate to the output of every attention layer.

    Heads, position encoding, window and kernel do not change.
    """

    stage = "replace"

    def apply(self, cfg: Tree) -> Tree:
        """Replace every attention layer. Raise `ConfigError` if the config has none of this kind."""
        return replace_config(cfg, Attention, GatedAttention.Config())
