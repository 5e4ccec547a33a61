"""Solar Open in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Settings
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.shared_experts import FIRST, SHARED_EXPERT_RULES, SharedExperts


class SolarOpen(SharedExperts, d.RopeDecoder):
    """Solar Open: the experts of GLM-4.5 in every layer, and the attention of Llama."""

    experiment = "llama3-8b"
    architectures = ("SolarOpenForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, "rms_norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-5),
        "attention_bias": d.QKV_BIAS, "tie_word_embeddings": d.TIED,
    }  # fmt: skip
    fixed: ClassVar = {"hidden_act": "silu", "use_qk_norm": False, FIRST: 0}
    unused_keys: ClassVar = ("intermediate_size",)
    rules: ClassVar = (*SHARED_EXPERT_RULES, *d.ATTENTION_RULES)
    rope = attrs.evolve(ALL_LAYERS, theta=1_000_000.0)
    defaults: ClassVar = {**SharedExperts.defaults, "routed_scaling_factor": 1.0, FIRST: 0}

    def fraction(self, hf: Settings) -> float:
        """Return 1: by default, all of a head rotates."""
        return 1.0
