"""MiniMax-M2 in Hugging Face format."""

from typing import Any, ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.table import Rule

MOE = "block_sparse_moe"


class MiniMaxM2(d.RopeDecoder):
    """MiniMax-M2: norms over all heads, a rotary encoding of half a head, and sigmoid routing without shared experts."""

    experiment = "llama3-8b"
    architectures = ("MiniMaxM2ForCausalLM",)
    keys: ClassVar = {
        **d.MIXTURE,
        "num_local_experts|num_experts": f"{d.FEED_FORWARD}.num_experts",
        "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
    }
    fixed: ClassVar = {
        "hidden_act": "silu", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    }  # fmt: skip
    unused_keys = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size")
    rope = attrs.evolve(ALL_LAYERS, theta=5_000_000.0)
    rules: ClassVar = (
        *d.mixture_rules(MOE, ("w1", "w3", "w2")),
        Rule(f"{d.OURS}.feed_forward.router.bias", f"{d.THEIRS}.{MOE}.e_score_correction_bias"),
    )

    def fraction(self, hf: Settings) -> float:
        """Return the share that `rotary_dim` of the published files states, or 1."""
        rotary_dim = hf.get("rotary_dim")
        if rotary_dim is None:
            return 1.0
        return rotary_dim / (hf.get("head_dim") or hf.need("hidden_size") // hf.need("num_attention_heads"))

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        return {"moe": {"router": {"type": "sigmoid-router"}}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the norms. Raise `ConfigError` if a layer has linear attention."""
        kinds = hf.get("attn_type_list") or ()
        if any(kind != 1 for kind in kinds):
            raise unsupported("attn_type_list", kinds, ["1 for every layer"])
        return super().settings(hf) | {
            f"{d.ATTENTION}.qk_norm": {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6))},
            f"{d.ATTENTION}.qk_norm_over": "all_heads",
        }

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters, and `rotary_dim` for programs that read only the published keys."""
        attention = config.model.decoder.layer.attention
        size = attention.head_dim or config.model.decoder.hidden_dim // attention.num_heads
        return super().export_keys(config) | {"rotary_dim": int(attention.position.fraction * size)}
