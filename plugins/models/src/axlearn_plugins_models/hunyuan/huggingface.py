"""Dense Hunyuan models in Hugging Face format, and what all Hunyuan models share."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings
from axlearn_plugins_models.huggingface.rope import parameters, read_rope
from axlearn_plugins_models.huggingface.table import Rule

ROPE, ALPHA = "dynamic", "alpha"
HUNYUAN_NORM_RULES = tuple(
    Rule(f"{d.OURS}.attention.{part}_norm.weight", f"{d.THEIRS}.self_attn.{part}_layernorm.weight")
    for part in ("query", "key")
)


class HunyuanDecoder(d.RopeDecoder):
    """Hunyuan: queries and keys are normalized after the rotation, and frequencies are stretched by a fixed factor."""

    experiment = "llama3-8b"

    def position(self, hf: Settings) -> Json:
        """Return the position encoding. A fixed `alpha` makes `dynamic` scaling static."""
        rope = parameters(hf, self.rope)
        if rope["rope_type"] != ROPE or not rope.get(ALPHA):
            return read_rope(hf, rope=rope)
        scaling = {"type": "ntk-rope-scaling", "factor": float(rope[ALPHA])}
        return read_rope(hf, rope={"rope_type": "default", "rope_theta": rope["rope_theta"]}, scaling=scaling)

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms and the position encoding."""
        norm = {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-5))}
        return super().settings(hf) | {f"{d.ATTENTION}.qk_norm": norm, f"{d.ATTENTION}.qk_norm_last": True}

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters."""
        position = config.model.decoder.layer.attention.position
        if type(position.scaling).__name__ != "NTKScaling":
            return super().export_keys(config)
        rope = {"rope_type": ROPE, "rope_theta": position.theta, ALPHA: position.scaling.factor, "factor": 1.0}
        return {"rope_parameters": rope}


class HunyuanV1Dense(HunyuanDecoder):
    """Dense Hunyuan models, from 0.5B to 7B."""

    architectures = ("HunYuanDenseV1ForCausalLM",)
    keys: ClassVar = {**d.RopeDecoder.keys, "attention_bias": d.ATTENTION_BIAS}
    fixed: ClassVar = {"use_qk_norm": True, "mlp_bias": False, "use_cla": False, "norm_type": "rms"}
    unused_keys = ("eod_token_id", "sep_token_id", "cla_share_factor", "attention_head_dim")
    rules: ClassVar = (*d.RopeDecoder.rules, *HUNYUAN_NORM_RULES)
