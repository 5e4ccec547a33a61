"""The first OLMo in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d


class Olmo(d.RopeDecoder):
    """OLMo: a Llama with a LayerNorm that has no parameters."""

    experiment = "llama3-8b"
    architectures = ("OlmoForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.DENSE, "tie_word_embeddings": d.TIED, "attention_bias": d.ATTENTION_BIAS,
    }  # fmt: skip
    fixed: ClassVar = {"clip_qkv": None}
    norm: ClassVar = {"type": "layer-norm", "eps": 1e-5, "scale": False, "bias": False}
