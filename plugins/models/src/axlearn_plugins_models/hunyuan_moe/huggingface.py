"""Hunyuan-A13B in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.rope import parameters, read_rope
from axlearn_plugins_models.huggingface.table import Rule

NORMS = {"query_norm": "query_layernorm", "key_norm": "key_layernorm"}
ROPE, ALPHA = "dynamic", "alpha"


def one_value(key: str, value: Any) -> int:
    """Return the number in a key that states one number, or the same number for each layer."""
    numbers = {*value} if isinstance(value, list) else {value}
    if len(numbers) != 1:
        raise unsupported(key, value, ["the same number for each layer"])
    return numbers.pop()


class HunyuanV1Moe(d.RopeDecoder):
    """Hunyuan-A13B: norms after the rotation, stretched frequencies, and a shared expert of the size of a routed one."""

    experiment = "llama3-8b"
    architectures = ("HunYuanMoEV1ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.NORMS, "tie_word_embeddings": d.TIED,
        "intermediate_size": Key((f"{d.FEED_FORWARD}.hidden_dim", f"{d.FEED_FORWARD}.shared.hidden_dim")),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_qk_norm": True,
                       "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "use_cla": False, "norm_type": "rms"}  # fmt: skip
    unused_keys = ("eod_token_id", "sep_token_id", "cla_share_factor", "attention_head_dim", "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token")
    rules: ClassVar = (
        *d.mixture_rules(), *d.feed_forward_rules("feed_forward.shared", "mlp.shared_mlp"),
        Rule(f"{d.OURS}.feed_forward.router.weight", f"{d.THEIRS}.mlp.gate.wg.weight", "e d -> d e"),
        *(Rule(f"{d.OURS}.attention.{a}.weight", f"{d.THEIRS}.self_attn.{b}.weight") for a, b in NORMS.items()),
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts. Raise `ConfigError` if the layers or the sizes of the experts differ."""
        size = hf.need("intermediate_size")
        for key, expected in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
            if (got := hf.get(key)) is not None and one_value(key, got) != expected:
                raise unsupported(key, got, [str(expected)])
        numbers = {name: one_value(key, hf.need(key)) for name, key in (("num_experts", "num_experts"), ("top_k", "moe_topk"))}
        return {"moe": {**numbers, "shared_experts": 1, "router": {"type": "softmax-router", "normalize": True}}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms and the position encoding. A fixed `alpha` makes `dynamic` scaling static."""
        rope, scaling = parameters(hf, self.rope), {}
        if rope["rope_type"] == ROPE and rope.get(ALPHA):
            scaling = {"scaling": {"type": "ntk-rope-scaling", "factor": float(rope[ALPHA])}}
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return {
            f"{d.ATTENTION}.position": read_rope(hf, rope=rope, **scaling),
            f"{d.ATTENTION}.qk_norm": {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-5))},
            f"{d.ATTENTION}.qk_norm_last": True,
        }

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters and the numbers of experts; the inverse of `features` and `settings`."""
        layer = config.model.decoder.layer
        position, experts = layer.attention.position, layer.feed_forward
        keys = {"num_experts": experts.num_experts, "moe_topk": experts.top_k}
        if type(position.scaling).__name__ != "NTKScaling":
            return keys | super().export_keys(config)
        rope = {"rope_type": ROPE, "rope_theta": position.theta, ALPHA: position.scaling.factor, "factor": 1.0}
        return keys | {"rope_parameters": rope}
