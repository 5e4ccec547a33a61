"""Seed-OSS in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d


class SeedOss(d.RopeDecoder):
    """Seed-OSS: a Llama with biases for queries, keys and values."""

    experiment = "llama3-8b"
    architectures = ("SeedOssForCausalLM",)
    keys: ClassVar = d.with_defaults(
        {
            **d.RopeDecoder.keys,
            "attention_bias": d.bias_key(True, *d.QKV),
            "attention_out_bias": d.bias_key(False, "attention.output"),
            "mlp_bias": d.bias_key(False, *d.GATED),
        },
        head_dim=128,
    )
    unused_keys = ("residual_dropout",)
