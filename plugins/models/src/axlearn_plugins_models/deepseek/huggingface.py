"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437) in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import (
    missing_forms,
    parameters,
    read_rope,
    write_mscale,
    write_rope,
    yarn_scale,
)
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_transformer.alternate import Alternate

OURS, THEIRS = f"{d.OURS}.attention", f"{d.THEIRS}.self_attn"
QUERIES = (f"{OURS}.query.weight", f"{OURS}.query_rope.weight"), "(n h*) r -> r n h"


class DeepSeekV3(Family):
    """DeepSeek-V3: latent attention, shared experts, and routing by sigmoid scores with a bias."""

    experiment = "llama3-8b"
    architectures: ClassVar = ("DeepseekV3ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.NORMS, "tie_word_embeddings": d.TIED, "num_attention_heads": f"{d.ATTENTION}.num_heads",
        "qk_nope_head_dim": Key(f"{d.ATTENTION}.head_dim"),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu", "moe_layer_freq": 1}
    unused_keys: ClassVar = ("num_key_value_heads", "scoring_func", "topk_method", "mlp_bias")
    ignored: ClassVar = ("*.rotary_emb.inv_freq",)
    rules: ClassVar = (
        *d.OUTER_RULES, *d.NORM_RULES, *d.feed_forward_rules(), *d.expert_rules(),
        *d.feed_forward_rules("feed_forward.shared", "mlp.shared_experts"),
        Rule(QUERIES[0], f"{THEIRS}.q_b_proj.weight", QUERIES[1]),
        Rule(f"{OURS}.query_down.weight", f"{THEIRS}.q_a_proj.weight", "r d -> d r"),
        Rule(f"{OURS}.query_norm.weight", f"{THEIRS}.q_a_layernorm.weight"),
        Rule((f"{OURS}.down.weight", f"{OURS}.key_rope.weight"), f"{THEIRS}.kv_a_proj_with_mqa.weight", "r* d -> d r"),
        Rule(f"{OURS}.norm.weight", f"{THEIRS}.kv_a_layernorm.weight"),
        Rule((f"{OURS}.key.weight", f"{OURS}.value.weight"), f"{THEIRS}.kv_b_proj.weight", "(n h*) r -> r n h"),
        Rule(f"{OURS}.output.weight", f"{THEIRS}.o_proj.weight", "d (n h) -> n h d"),
        Rule(f"{d.OURS}.feed_forward.router.bias", f"{d.THEIRS}.mlp.gate.e_score_correction_bias"),
    )  # fmt: skip

    def table(self, model: Any) -> tuple[Rule, ...]:
        """Return the rules; queries without a latent have a different tensor name."""
        latent = any(".query_down." in path for path in model.abstract)
        return self.rules if latent else (*self.rules, Rule(QUERIES[0], f"{THEIRS}.q_proj.weight", QUERIES[1]))

    def router(self, hf: Settings) -> Json:
        """Return the config of the expert router."""
        groups = {"num_groups": hf.get("n_group") or 1, "top_groups": hf.get("topk_group") or 1}
        normalize, scale = hf.get("norm_topk_prob", True), float(hf.get("routed_scaling_factor", 2.5))
        return {"type": "sigmoid-router", "normalize": normalize, "scale": scale, **groups}

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for latent attention and experts."""
        latent = {"kv_rank": hf.need("kv_lora_rank"), "query_rank": hf.get("q_lora_rank") or 0,
                  "rope_head_dim": hf.need("qk_rope_head_dim"), "value_head_dim": hf.need("v_head_dim")}  # fmt: skip
        experts = {"num_experts": hf.need("n_routed_experts"), "top_k": hf.need("num_experts_per_tok"),
                   "hidden_dim": hf.need("moe_intermediate_size"), "shared_experts": hf.get("n_shared_experts") or 0,
                   "dense_layers": hf.get("first_k_dense_replace", 0), "router": self.router(hf)}  # fmt: skip
        return {"mla": latent, "moe": experts}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the size of the dense layers, the position encoding, and the attention scale that YaRN changes."""
        rope, size = parameters(hf), hf.need("intermediate_size")
        settings = {f"{d.ATTENTION}.position": read_rope(hf, interleaved=hf.get("rope_interleave", True))}
        if rope.get("mscale_all_dim"):
            head_dim = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
            settings[f"{d.ATTENTION}.scale"] = head_dim**-0.5 * yarn_scale(rope["factor"], rope["mscale_all_dim"]) ** 2
        return settings | ({f"{d.FEED_FORWARD}.first.*.hidden_dim": size} if hf.get("first_k_dense_replace") else {})

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        attention, slot = config.model.decoder.layer.attention, config.model.decoder.layer.feed_forward
        rope = write_rope(attention.position)
        if attention.scale is not None and rope["rope_type"] == "yarn":
            sharper = (attention.scale * (attention.head_dim + attention.rope_head_dim) ** 0.5) ** 0.5
            rope = write_mscale(rope, sharper)
        keys = {"rope_parameters": rope, "rope_interleave": attention.position.interleaved}
        return keys | self.write_latent(attention) | self.write_experts(slot)

    def write_latent(self, attention: Any) -> Json:
        """Return the keys of latent attention."""
        return {
            "kv_lora_rank": attention.kv_rank, "q_lora_rank": attention.query_rank,
            "qk_nope_head_dim": attention.head_dim, "qk_rope_head_dim": attention.rope_head_dim,
            "v_head_dim": attention.value_head_dim, "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_heads,
        }  # fmt: skip

    def write_experts(self, slot: Any) -> Json:
        """Return the keys of the feed-forward slot."""
        dense: list[Any] = [*slot.first] if isinstance(slot, Alternate) else []
        experts: Any = slot.children[0] if isinstance(slot, Alternate) else slot
        return {
            "n_routed_experts": experts.num_experts, "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.hidden_dim,
            "n_shared_experts": experts.shared.hidden_dim // experts.hidden_dim if experts.shared else 0,
            "first_k_dense_replace": len(dense),
            "intermediate_size": dense[0].hidden_dim if dense else experts.hidden_dim,
            **self.write_router(experts.router),
        }  # fmt: skip

    def write_router(self, router: Any) -> Json:
        """Invert `router`."""
        return {
            "n_group": router.num_groups, "topk_group": router.top_groups, "routed_scaling_factor": router.scale,
            "norm_topk_prob": router.normalize, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        }  # fmt: skip

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data)


class DeepSeekV2(DeepSeekV3):
    """DeepSeek-V2: softmax routing, limited to a few groups."""

    architectures = ("DeepseekV2ForCausalLM",)
    fixed: ClassVar = {**DeepSeekV3.fixed, "mlp_bias": False}
    unused_keys = (*DeepSeekV3.unused_keys, "norm_topk_prob")

    def router(self, hf: Settings) -> Json:
        """Return the config of the expert router; transformers ignores `norm_topk_prob` and never normalizes the weights."""
        groups = super().router(hf) if hf.get("topk_method") == "group_limited_greedy" else {}
        scale = float(hf.get("routed_scaling_factor", 1.0))
        return {**groups, "type": "softmax-router", "normalize": False, "scale": scale}

    def write_router(self, router: Any) -> Json:
        """Invert `router`."""
        method = "group_limited_greedy" if router.num_groups > 1 else "greedy"
        return super().write_router(router) | {"scoring_func": "softmax", "topk_method": method}
