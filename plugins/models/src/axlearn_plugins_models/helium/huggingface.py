"""Helium in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS


class Helium(d.RopeDecoder):
    """Helium: a Llama that rotates adjacent pairs."""

    experiment = "llama3-8b"
    architectures = ("HeliumForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys, "attention_bias": d.QKV_BIAS, "mlp_bias": d.MLP_BIAS,
        "num_key_value_heads": Key(f"{d.ATTENTION}.num_kv_heads", default=20),
        "head_dim": Key(f"{d.ATTENTION}.head_dim", default=128),
        "rms_norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-8),
    }  # fmt: skip
    rope = attrs.evolve(ALL_LAYERS, theta=100_000.0)
    interleaved = True
