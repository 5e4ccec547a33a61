"""Llama 2, 3, and 3.1 to 3.3 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface.decoder import ATTENTION_BIAS, MLP_BIAS, RopeDecoder


class Llama(RopeDecoder):
    """`LlamaForCausalLM`, including other models that were released with this architecture."""

    experiment = "llama3-8b"
    architectures = ("LlamaForCausalLM",)
    common = True
    keys: ClassVar = {**RopeDecoder.keys, "attention_bias": ATTENTION_BIAS, "mlp_bias": MLP_BIAS}
