"""Seed-OSS in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key


class SeedOss(d.RopeDecoder):
    """Seed-OSS: a Llama with biases of queries, keys and values."""

    experiment = "llama3-8b"
    architectures = ("SeedOssForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys,
        "attention_bias": attrs.evolve(d.QKV_BIAS, default=True),
        "attention_out_bias": Key(f"{d.ATTENTION}.output.bias", default=False),
        "mlp_bias": d.MLP_BIAS,
        "head_dim": Key(f"{d.ATTENTION}.head_dim", default=128),
        "num_key_value_heads": Key(f"{d.ATTENTION}.num_kv_heads", default=8),
    }
    unused_keys = ("residual_dropout",)
