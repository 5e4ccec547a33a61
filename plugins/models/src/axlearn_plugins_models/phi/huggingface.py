"""Phi-3 and Phi-4 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key, Settings


class Phi3(d.RopeDecoder):
    """Phi-3 and Phi-4: a Llama with fused matrices. LongRoPE is not supported."""

    experiment = "llama3-8b"
    architectures = ("Phi3ForCausalLM",)
    keys: ClassVar = {**d.RopeDecoder.keys, "sliding_window": Key(f"{d.ATTENTION}.window", default=None)}
    unused_keys = ("original_max_position_embeddings",)
    rules: ClassVar = (
        *d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES, *d.FUSED_QKV_RULES, *d.FUSED_FEED_FORWARD_RULES,
    )  # fmt: skip

    def fraction(self, hf: Settings) -> float:
        """Return 1: `partial_rotary_factor` is supported."""
        return 1.0
