"""Hunyuan-A13B in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_models.hunyuan.huggingface import HUNYUAN_NORM_RULES, HunyuanDecoder


def one_value(key: str, value: Any) -> int:
    """Return the number in a key that states one number, or the same number for each layer."""
    numbers = {*value} if isinstance(value, list) else {value}
    if len(numbers) != 1:
        raise unsupported(key, value, ["the same number for each layer"])
    return numbers.pop()


class HunyuanV1Moe(HunyuanDecoder):
    """Hunyuan-A13B: norms after the rotation, stretched frequencies, and a shared expert of the size of a routed one."""

    architectures = ("HunYuanMoEV1ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.NORMS, "tie_word_embeddings": d.TIED,
        "intermediate_size": Key((f"{d.FEED_FORWARD}.hidden_dim", f"{d.FEED_FORWARD}.shared.hidden_dim")),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_qk_norm": True,
                       "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "use_cla": False, "norm_type": "rms"}  # fmt: skip
    unused_keys = ("eod_token_id", "sep_token_id", "cla_share_factor", "attention_head_dim", "capacity_factor", "moe_drop_tokens",
                   "moe_random_routing_dropped_token")  # fmt: skip
    rules: ClassVar = (
        *d.mixture_rules(), *d.feed_forward_rules("feed_forward.shared", "mlp.shared_mlp"),
        Rule(f"{d.OURS}.feed_forward.router.weight", f"{d.THEIRS}.mlp.gate.wg.weight", "e d -> d e"),
        *HUNYUAN_NORM_RULES,
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts. Raise `ConfigError` if the layers or the sizes of the experts differ."""
        size = hf.need("intermediate_size")
        for key, expected in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
            if (got := hf.get(key)) is not None and one_value(key, got) != expected:
                raise unsupported(key, got, [str(expected)])
        numbers = {
            name: one_value(key, hf.need(key)) for name, key in (("num_experts", "num_experts"), ("top_k", "moe_topk"))
        }
        return {"moe": {**numbers, "shared_experts": 1, "router": {"type": "softmax-router", "normalize": True}}}

    def export_keys(self, config: Any) -> Json:
        """Return the numbers of experts; the inverse of `features`."""
        experts = config.model.decoder.layer.feed_forward
        return super().export_keys(config) | {"num_experts": experts.num_experts, "moe_topk": experts.top_k}
