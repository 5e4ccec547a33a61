"""The feature `gated-attention`."""

from typing import Any, TypeVar

from axlearn_core.extend import Feature, Node, node, replace_config
from axlearn_plugins_my_attention.layer import GatedAttention
from axlearn_plugins_transformer.attention import Attention

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseGatedAttention(Feature):
    """Puts a gate on the output of every attention. Heads, position encoding, window and kernel stay as they are."""

    stage = "replace"

    def apply(self, cfg: Tree) -> Tree:
        """Raises `ConfigError` if the config has no attention of this kind."""
        return replace_config(cfg, Attention, GatedAttention.Config())
