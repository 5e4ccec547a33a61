"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437) in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.depth_tensors import NEXT_LAYERS
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import each_value
from axlearn_plugins_models.huggingface.rope import (
    missing_forms,
    parameters,
    read_rope,
    write_mscale,
    write_rope,
    yarn_scale,
)
from axlearn_plugins_models.huggingface.shared_experts import FIRST, SHARED_EXPERT_RULES, TYPES, SharedExperts
from axlearn_plugins_models.huggingface.table import Rule

OURS, THEIRS = f"{d.OURS}.attention", f"{d.THEIRS}.self_attn"
INDEXED = "indexed_attention"
QUERIES = (f"{OURS}.query.weight", f"{OURS}.query_rope.weight"), "(n h*) r -> r n h"


class DeepSeekV3(SharedExperts):
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
    depths: ClassVar = NEXT_LAYERS
    rules: ClassVar = (
        *SHARED_EXPERT_RULES,
        Rule(QUERIES[0], f"{THEIRS}.q_b_proj.weight", QUERIES[1]),
        Rule(f"{OURS}.query_down.weight", f"{THEIRS}.q_a_proj.weight", "r d -> d r"),
        Rule(f"{OURS}.query_norm.weight", f"{THEIRS}.q_a_layernorm.weight"),
        Rule((f"{OURS}.down.weight", f"{OURS}.key_rope.weight"), f"{THEIRS}.kv_a_proj_with_mqa.weight", "r* d -> d r"),
        Rule(f"{OURS}.norm.weight", f"{THEIRS}.kv_a_layernorm.weight"),
        Rule((f"{OURS}.key.weight", f"{OURS}.value.weight"), f"{THEIRS}.kv_b_proj.weight", "(n h*) r -> r n h"),
        Rule(f"{OURS}.output.weight", f"{THEIRS}.o_proj.weight", "d (n h) -> n h d"),
    )  # fmt: skip

    def table(self, model: Any) -> tuple[Rule, ...]:
        """Return the rules; queries without a latent have a different tensor name."""
        latent = any(".query_down." in path for path in model.abstract)
        return self.rules if latent else (*self.rules, Rule(QUERIES[0], f"{THEIRS}.q_proj.weight", QUERIES[1]))

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for latent attention and experts."""
        latent = {"kv_rank": hf.need("kv_lora_rank"), "query_rank": hf.get("q_lora_rank") or 0,
                  "rope_head_dim": hf.need("qk_rope_head_dim"), "value_head_dim": hf.need("v_head_dim")}  # fmt: skip
        return {"mla": latent, **super().features(hf)}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the size of the dense layers, the position encoding, and the attention scale that YaRN changes."""
        rope = parameters(hf)
        settings = {f"{d.ATTENTION}.position": read_rope(hf, interleaved=hf.get("rope_interleave", True))}
        if rope.get("mscale_all_dim"):
            head_dim = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
            settings[f"{d.ATTENTION}.scale"] = head_dim**-0.5 * yarn_scale(rope["factor"], rope["mscale_all_dim"]) ** 2
        return super().settings(hf) | settings

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        attention = config.model.decoder.layer.attention
        rope = write_rope(attention.position)
        if attention.scale is not None and rope["rope_type"] == "yarn":
            sharper = (attention.scale * (attention.head_dim + attention.rope_head_dim) ** 0.5) ** 0.5
            rope = write_mscale(rope, sharper)
        keys = {"rope_parameters": rope, "rope_interleave": attention.position.interleaved}
        return super().export_keys(config) | keys | self.write_latent(attention)

    def write_latent(self, attention: Any) -> Json:
        """Return the keys of latent attention."""
        return {
            "kv_lora_rank": attention.kv_rank, "q_lora_rank": attention.query_rank,
            "qk_nope_head_dim": attention.head_dim, "qk_rope_head_dim": attention.rope_head_dim,
            "v_head_dim": attention.value_head_dim, "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_heads,
        }  # fmt: skip

    def write_router(self, router: Any) -> Json:
        """Invert `router`."""
        return super().write_router(router) | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data)


class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3.2: an indexer chooses the keys that each query sees.

    Attributes:
        adjacent: Whether the indexer rotates adjacent elements.
    """

    architectures = ("DeepseekV32ForCausalLM",)
    depths: ClassVar = None
    fixed: ClassVar = {**DeepSeekV3.fixed, "mlp_bias": False}
    rules: ClassVar = (
        *DeepSeekV3.rules,
        Rule(f"{OURS}.indexer.query.weight", f"{THEIRS}.indexer.wq_b.weight", "(n h) r -> r n h"),
        Rule(f"{OURS}.indexer.key.weight", f"{THEIRS}.indexer.wk.weight", "h d -> d h"),
        Rule(f"{OURS}.indexer.weight.weight", f"{THEIRS}.indexer.weights_proj.weight", "n d -> d n"),
        *(Rule(f"{OURS}.indexer.norm.{part}", f"{THEIRS}.indexer.k_norm.{part}") for part in ("weight", "bias")),
    )
    adjacent: ClassVar[bool] = False

    def indexers(self, hf: Settings, indexer: Json) -> Any:
        """Return the `indexer` slot, from the config of an indexer."""
        return indexer

    def settings(self, hf: Settings) -> Json:
        """Return settings as for DeepSeek-V3, and for the indexer. Raise `ConfigError` if a layer has none."""
        if {*(kinds := hf.get("layer_types") or ())} - {INDEXED}:
            raise unsupported("layer_types", kinds, [f"{INDEXED} for every layer"])
        hf.need("q_lora_rank")
        settings, size = super().settings(hf), hf.get("index_head_dim", 128)
        fraction = hf.need("qk_rope_head_dim") / size
        position = settings[f"{d.ATTENTION}.position"] | {"fraction": fraction, "interleaved": self.adjacent}
        indexer = {"type": "lightning-indexer", "head_dim": size, "num_heads": hf.get("index_n_heads", 64),
                   "top_k": hf.get("index_topk", 2048), "position": position}  # fmt: skip
        return settings | {f"{d.ATTENTION}.indexer": self.indexers(hf, indexer)}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        indexer = each_value(decoder.layer.attention.indexer, 1)[0]
        return super().export_keys(config) | {
            "index_head_dim": indexer.head_dim, "index_n_heads": indexer.num_heads, "index_topk": indexer.top_k,
            "layer_types": [INDEXED] * decoder.num_layers,
        }  # fmt: skip

    def write_dense(self, dense: int, count: int) -> Json:
        """Return the keys for `dense` layers at the bottom of `count` layers."""
        return {FIRST: dense, TYPES: ["dense"] * dense + ["sparse"] * (count - dense)}


class DeepSeekV2(DeepSeekV3):
    """DeepSeek-V2: softmax routing, limited to a few groups."""

    architectures = ("DeepseekV2ForCausalLM",)
    depths: ClassVar = None
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


class KimiK2(DeepSeekV3):
    """Kimi K2: DeepSeek-V3 with more experts, fewer heads, and one group of experts."""
