"""GLM-4 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings


class Glm(d.RopeDecoder):
    """GLM-4: half of each head rotates in adjacent pairs, and the gate and up projections are one tensor."""

    experiment = "llama3-8b"
    architectures: ClassVar = ("GlmForCausalLM",)
    keys: ClassVar = d.with_defaults(
        {**d.RopeDecoder.keys, "attention_bias": d.bias_key(True, *d.QKV)},
        num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7,
    )  # fmt: skip
    rules: ClassVar = (*d.RopeDecoder.rules, d.FUSED_GATE)
    fraction = 0.5
    interleaved = True


class Glm4(Glm):
    """GLM-4 0414: GLM-4 with norms around each half of a layer."""

    architectures = ("Glm4ForCausalLM",)
    keys: ClassVar = {**Glm.keys, "rms_norm_eps": d.norm_key(1.5625e-7, "norm", "post_norm")}
    rules = (
        *Glm.rules,
        *d.norm_rules({"attention_post_norm": "post_self_attn_layernorm", "feed_forward_post_norm": "post_mlp_layernorm"}),
    )

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the norms after each half."""
        return super().settings(hf) | {f"{d.LAYER}.post_norm": {"type": "rms-norm"}}
