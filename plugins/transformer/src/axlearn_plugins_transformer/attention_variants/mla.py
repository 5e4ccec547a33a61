"""The `mla` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, find, get_options, map, node, replace_config, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseLatentAttention(Feature):
    """Replaces every attention layer with multi-head latent attention (DeepSeek-V2).

    The new attention keeps the heads, their size, position encoding, window, softcap, causality, kernel and the
    projections that both layers have. `num_kv_heads` is dropped because every head has its own keys, and `qk_norm` because the
    latents have norms. The position encoding applies to a part of the queries, of size `rope_head_dim`, and to one key
    that all heads share. Any other setting of the attention, such as a different KV cache, is an error.

    Unset options default to the paper's ratios. If the attention is already latent, only the given options change.

    Attributes:
        kv_rank: Rank of the key-value latents.
        query_rank: Rank of the query latents, or 0 for none.
        rope_head_dim: Positional size of a head.
        value_head_dim: Size of a value.
    """

    stage = "replace"
    replaces = ("model.**.num_kv_heads", "model.**.qk_norm")
    no_bridge = (
        "it computes keys and values from a short latent, and encodes positions in only a part of each head; "
        "the weights of a dense attention cannot be factored this way without changing its function"
    )

    kv_rank: int | None = setting(default=None, ge=1)
    query_rank: int | None = setting(default=None, ge=0)
    rope_head_dim: int | None = setting(default=None, ge=1)
    value_head_dim: int | None = setting(default=None, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Replace every `Attention`, and set the options on every `LatentAttention`."""
        if not find(cfg, Attention) and not find(cfg, LatentAttention):
            raise ConfigError(
                Problem(
                    path="model",
                    message="mla finds no attention to replace",
                    expected="an attention or a latent-attention",
                    fix="leave mla out",
                )
            )
        names = ("kv_rank", "query_rank", "rope_head_dim", "value_head_dim")
        option_values = get_options(self, *names)
        if self.query_rank == 0:
            option_values["query_rank"] = None
        result = replace_config(cfg, Attention, LatentAttention.Config(), drop=("num_kv_heads", "qk_norm"))

        def set_options(part: Node[Any]) -> Node[Any]:
            return attrs.evolve(part, **option_values) if isinstance(part, LatentAttention.Config) else part

        return map(result, set_options) if option_values else result
