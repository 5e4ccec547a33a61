"""Tell keys of `config.json` that change what a model computes from keys that do not.

Files have keys that a family does not read. Most of them have no effect, so an import lists them and goes on. A key of `NEUTRAL`
changes the results of the models that have it: a later version of transformers may have added it to the family. Keys that no family
knows are refused if their names suggest that they change results.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_models.huggingface.layer_cycle import FULL

_OFF: tuple[Any, ...] = (False, None)
_NONE: tuple[Any, ...] = (None,)
_ONE: tuple[Any, ...] = (1.0, None)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """
        alibi apply_residual_connection_post_layernorm attention_bias attn_output_gate bias mlp_bias moe_layers
        multi_query new_decoder_architecture parallel_attn qk_layernorm qk_norm qkv_bias scale_embedding
        use_attention_sinks use_bias use_mla use_mrope use_parallel_residual use_post_norm use_qk_norm use_qkv_bias
        use_rotary_embedding_inverse use_sliding_window
        """.split(),  # noqa: SIM905 - as in `family.IRRELEVANT`
        _OFF,
    ),
    **dict.fromkeys(
        """
        attention_chunk_size attention_multiplier attention_sink_size attn_logit_softcapping clip_qkv
        final_logit_softcapping logit_softcap no_rope_layers query_pre_attn_scalar residual_scale sliding_window
        vocab_size_per_layer_input
        """.split(),  # noqa: SIM905
        _NONE,
    ),
    **dict.fromkeys(
        """
        embedding_multiplier lm_head_multiplier logit_scale logits_scaling partial_rotary_factor residual_multiplier
        rotary_pct routed_scaling_factor scale_depth scale_emb
        """.split(),  # noqa: SIM905
        _ONE,
    ),
    **dict.fromkeys(
        "n_routed_experts n_shared_experts num_experts num_kv_shared_layers num_local_experts".split(),  # noqa: SIM905
        (0, None),
    ),
}
"""Key -> the values with which a model computes what it would compute without the key."""

_PART = "attn|attention|embedding|head|key|logit|logits|mlp|output|qk|query|residual|value"
_SUGGESTS = re.compile(
    rf"clip|softcap|sinks?(_|$)|rotary|(^|_)({_PART})_(bias|clip|gate|gating|multiplier|norm|scale|scaling)(_|$)"
)


def check_unread(data: Mapping[str, Any], unread: Iterable[str], model_type: str) -> None:
    """Raise `ConfigError` if a key that the family did not read changes what the model computes.

    Args:
        data: Content of `config.json`.
        unread: Keys that the family did not read.
        model_type: Family.
    """
    neutral = {**NEUTRAL, "layer_types": (FULL,)}
    problems = [
        Problem(
            path=f"config.json: {key}",
            message=f"the family {model_type!r} does not read this key, "
            + (
                "which changes what a model computes"
                if key in neutral
                else "whose name suggests that it changes results"
            ),
            got=repr(data[key])[:80],
            expected=" or ".join("no such key" if v is None else repr(v) for v in neutral.get(key, _NONE)),
            fix="install or write a family that supports it (see docs/huggingface.md); if the weights were trained without it, "
            "delete the key",
        )
        for key in unread
        if _has_effect(key, data)
    ]
    if problems:
        raise ConfigError(problems)


def _has_effect(key: str, data: Mapping[str, Any]) -> bool:
    value = data[key]
    if key == "layer_types":
        return value is not None and (not isinstance(value, list) or any(kind != FULL for kind in value))
    if key == "sliding_window" and type(value) is int:
        length = data.get("max_position_embeddings")
        return data.get("use_sliding_window") is not False and not (type(length) is int and value >= length)
    if key in NEUTRAL:
        return value not in NEUTRAL[key]
    plain = value is None or value is False or (type(value) in (int, float) and value in (0, 1))
    return _SUGGESTS.search(key) is not None and not plain
