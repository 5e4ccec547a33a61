"""Mistral and Mixtral in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface.decoder import (
    ATTENTION,
    ATTENTION_RULES,
    FEED_FORWARD,
    HEADS,
    NORM_RULES,
    NORMS,
    OUTER_RULES,
    SIZES,
    TIED,
    RopeDecoder,
    expert_rules,
)
from axlearn_plugins_models.huggingface.family import Json, Key, Settings

WINDOW = Key(f"{ATTENTION}.window", default=None)


class Mistral(RopeDecoder):
    """Mistral: a Llama, with a sliding window in its first version."""

    experiment = "llama3-8b"
    architectures = ("MistralForCausalLM",)
    keys: ClassVar = {**RopeDecoder.keys, "sliding_window": WINDOW}


class Mixtral(RopeDecoder):
    """Mixtral: experts in every layer, and the router's weights of a token sum to 1."""

    experiment = "llama3-8b"
    architectures = ("MixtralForCausalLM",)
    keys: ClassVar = {
        **SIZES, **HEADS, **NORMS, "tie_word_embeddings": TIED, "sliding_window": WINDOW,
        "num_local_experts": f"{FEED_FORWARD}.num_experts",
        "num_experts_per_tok": f"{FEED_FORWARD}.top_k",
        "intermediate_size": f"{FEED_FORWARD}.hidden_dim",
    }  # fmt: skip
    fixed: ClassVar = {"hidden_act": "silu"}
    rules = (
        *OUTER_RULES, *NORM_RULES, *ATTENTION_RULES, *expert_rules("block_sparse_moe", ("w1", "w3", "w2"))
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Experts."""
        return {"moe": {"router": {"type": "softmax-router", "normalize": True}}}
