"""Helium in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS


class Helium(d.RopeDecoder):
    """Helium: a Llama that rotates adjacent pairs."""

    experiment = "llama3-8b"
    architectures = ("HeliumForCausalLM",)
    keys: ClassVar = d.with_defaults(
        {
            **d.RopeDecoder.keys,
            "attention_bias": d.bias_key(False, *d.QKV),
            "mlp_bias": d.bias_key(False, *d.GATED),
        },
        num_key_value_heads=20, head_dim=128, rms_norm_eps=1e-8,
    )  # fmt: skip
    rope = attrs.evolve(ALL_LAYERS, theta=100_000.0)
    interleaved = True
