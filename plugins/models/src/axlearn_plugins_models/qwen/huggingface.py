"""Qwen 2.5, Qwen 2 MoE, Qwen 3 and Qwen 3 MoE in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface.decoder import (
    ATTENTION,
    FEED_FORWARD,
    MIXTURE,
    OURS,
    THEIRS,
    RopeDecoder,
    feed_forward_rules,
    mixture_rules,
)
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.table import Rule


class Qwen2(RopeDecoder):
    """Qwen 2 and 2.5: queries, keys and values have biases."""

    experiment = "llama3-8b"
    architectures = ("Qwen2ForCausalLM",)
    fixed: ClassVar = {"use_sliding_window": False}
    unused_keys = ("sliding_window", "layer_types")

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the biases."""
        return super().settings(hf) | {f"{ATTENTION}.{part}.bias": True for part in ("query", "key", "value")}


class Qwen2Moe(RopeDecoder):
    """Qwen 1.5 and 2 MoE: experts in every layer, and a shared expert with a gate."""

    experiment = "llama3-8b"
    architectures = ("Qwen2MoeForCausalLM",)
    keys: ClassVar = {
        **MIXTURE,
        "num_experts|num_local_experts": f"{FEED_FORWARD}.num_experts",
        "moe_intermediate_size": f"{FEED_FORWARD}.hidden_dim",
        "shared_expert_intermediate_size": f"{FEED_FORWARD}.shared.hidden_dim",
        "norm_topk_prob": Key(f"{FEED_FORWARD}.router.normalize", default=False),
        "qkv_bias": Key(tuple(f"{ATTENTION}.{part}.bias" for part in ("query", "key", "value")), default=True),
    }
    fixed: ClassVar = {
        "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu"
    }  # fmt: skip
    unused_keys = ("sliding_window", "layer_types", "intermediate_size")
    rules: ClassVar = (
        *mixture_rules(),
        *feed_forward_rules("feed_forward.shared", "mlp.shared_expert"),
        Rule(f"{OURS}.feed_forward.shared_gate.weight", f"{THEIRS}.mlp.shared_expert_gate.weight", "o d -> d o"),
    )

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        return {"moe": {"shared_experts": 1}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the gate of the shared expert."""
        return super().settings(hf) | {f"{FEED_FORWARD}.shared_gate": {"type": "linear"}}


class Qwen3(RopeDecoder):
    """Qwen 3: a norm on each head of queries and keys, without biases."""

    experiment = "llama3-8b"
    architectures: ClassVar = ("Qwen3ForCausalLM",)
    fixed: ClassVar = {"attention_bias": False, "use_sliding_window": False}
    unused_keys: ClassVar = ("sliding_window", "layer_types")

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the per-head norm."""
        norm = {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6))}
        return super().settings(hf) | {f"{ATTENTION}.qk_norm": norm}


class Qwen3Moe(Qwen3):
    """Qwen 3 with experts in every layer."""

    experiment = "qwen3-30b-a3b"
    architectures = ("Qwen3MoeForCausalLM",)
    keys: ClassVar = {
        **MIXTURE,
        "num_experts|num_local_experts": f"{FEED_FORWARD}.num_experts",
        "moe_intermediate_size": f"{FEED_FORWARD}.hidden_dim",
        "norm_topk_prob": Key(f"{FEED_FORWARD}.router.normalize", default=False),
    }
    fixed: ClassVar = {**Qwen3.fixed, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu"}
    unused_keys = (*Qwen3.unused_keys, "intermediate_size")
    rules = mixture_rules()

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters, and a dense feed-forward size, which transformers requires although no layer has it."""
        return super().export_keys(config) | {"intermediate_size": 3 * config.model.decoder.hidden_dim}
