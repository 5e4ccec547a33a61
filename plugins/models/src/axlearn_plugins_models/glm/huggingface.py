"""GLM-4 in Hugging Face format: the models of 2024 (`glm`) and of 2025 (`glm4`)."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.table import Rule

EPS = 1.5625e-07


class Glm(d.RopeDecoder):
    """GLM-4: half of each head rotates, in adjacent pairs, and `gate` and `up` are one tensor."""

    experiment = "llama3-8b"
    architectures = ("GlmForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys,
        "attention_bias": attrs.evolve(d.QKV_BIAS, default=True),
        "num_key_value_heads": Key(f"{d.ATTENTION}.num_kv_heads", default=2),
        "head_dim": Key(f"{d.ATTENTION}.head_dim", default=128),
        "rms_norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=EPS),
    }
    rules: ClassVar = (*d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES, *d.FUSED_FEED_FORWARD_RULES)
    interleaved = True

    def fraction(self, hf: Settings) -> float:
        """Return a half."""
        return 0.5


class Glm4(Glm):
    """GLM-4-0414: GLM-4 with a norm after each half of a layer, too."""

    architectures = ("Glm4ForCausalLM",)
    keys: ClassVar = {
        **Glm.keys,
        "rms_norm_eps": Key(
            (f"{d.LAYER}.norm.eps", "model.decoder.norm.eps", f"{d.LAYER}.post_norm.eps"), default=EPS, read=float
        ),
    }
    rules: ClassVar = (
        *Glm.rules,
        Rule(f"{d.OURS}.attention_post_norm.weight", f"{d.THEIRS}.post_self_attn_layernorm.weight"),
        Rule(f"{d.OURS}.feed_forward_post_norm.weight", f"{d.THEIRS}.post_mlp_layernorm.weight"),
    )

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the norms."""
        return super().settings(hf) | {f"{d.LAYER}.post_norm": {"type": "rms-norm"}}
