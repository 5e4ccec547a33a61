"""The feature `mla`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, find, map, node, options_of, replace_config, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseLatentAttention(Feature):
    """Multi-head latent attention (DeepSeek-V2) in the place of every multi-head or grouped-query attention.

    Heads, their size, position encoding, window, softcap, causality, kernel and projections that both have are taken over;
    `num_kv_heads` goes, as every head has keys of its own, and so does `qk_norm`, as the latents have norms. The position
    encoding works on a part of the queries and one key for all heads, of `rope_head_dim`. What else was set on the
    attention (another KV cache) has no counterpart and is an error.

    `kv_rank` is the size of the latent that keys and values are made of, `query_rank` that of the queries (0 for none),
    `value_head_dim` the size of a value. What is not given has the ratios of the paper. On an attention that is latent
    already, the options that are given are set, and the others stay.
    """

    stage = "replace"
    no_bridge = (
        "it makes keys and values of one short latent, and gives positions to a part of each head only; "
        "no weights of a dense attention become such factors without another function"
    )

    kv_rank: int | None = setting(default=None, ge=1)
    query_rank: int | None = setting(default=None, ge=0)
    rope_head_dim: int | None = setting(default=None, ge=1)
    value_head_dim: int | None = setting(default=None, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Swaps every `Attention`, and sets the options on every `LatentAttention`."""
        if not find(cfg, Attention) and not find(cfg, LatentAttention):
            raise ConfigError(
                Problem(
                    path="model",
                    message="mla finds no attention that it could replace",
                    expected="an attention or a latent-attention",
                    fix="leave mla out",
                )
            )
        names = ("kv_rank", "query_rank", "rope_head_dim", "value_head_dim")
        option_values = options_of(self, *names)
        if self.query_rank == 0:
            option_values["query_rank"] = None
        result = replace_config(cfg, Attention, LatentAttention.Config(), drop=("num_kv_heads", "qk_norm"))

        def options(part: Node[Any]) -> Node[Any]:
            return attrs.evolve(part, **option_values) if isinstance(part, LatentAttention.Config) else part

        return map(result, options) if option_values else result
