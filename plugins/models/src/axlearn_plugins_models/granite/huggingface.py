"""Granite 3 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.granite_moe.huggingface import MULTIPLIERS
from axlearn_plugins_models.huggingface import decoder as d


class Granite(d.RopeDecoder):
    """Granite: a Llama with factors for embeddings, scores, residual sums and logits."""

    experiment = "llama3-8b"
    architectures = ("GraniteForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys, **MULTIPLIERS, "attention_bias": d.ATTENTION_BIAS, "mlp_bias": d.MLP_BIAS,
    }  # fmt: skip
