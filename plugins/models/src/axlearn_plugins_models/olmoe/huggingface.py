"""OLMoE (arXiv 2409.02060) in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings


class Olmoe(d.RopeDecoder):
    """OLMoE: experts in every layer, and norms over all heads of queries and keys."""

    experiment = "llama3-8b"
    architectures = ("OlmoeForCausalLM",)
    keys: ClassVar = {
        **d.MIXTURE,
        "num_experts|num_local_experts": f"{d.FEED_FORWARD}.num_experts",
        "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
        "norm_topk_prob": Key(f"{d.FEED_FORWARD}.router.normalize", default=False),
    }
    fixed: ClassVar = {"attention_bias": False, "clip_qkv": None, "hidden_act": "silu"}
    rules = d.mixture_rules()

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the experts, with the weights of the losses in the paper."""
        return {"moe": {"router": {"type": "softmax-router", "load_balance": 0.01, "z_loss": 0.001}}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the norms of queries and keys."""
        return super().settings(hf) | {
            f"{d.ATTENTION}.qk_norm": {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-5))},
            f"{d.ATTENTION}.qk_norm_over": "all_heads",
        }
