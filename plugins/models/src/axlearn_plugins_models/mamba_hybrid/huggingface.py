"""Models with Mamba-2 in most layers in Hugging Face format: Granite 4 and Bamba."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface import recurrent_layers as r
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import FACTOR, missing_forms, parameters, read_rope, write_rope
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_transformer.feed_forward import GatedFeedForward

FEED, MOE = f"{d.OURS}.feed_forward", f"{d.THEIRS}.block_sparse_moe"
MAMBA_RULES = (*d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES, *r.mamba2_rules(f"{d.THEIRS}.mamba"))


class MambaHybrid(Family):
    """Base class for families whose layers have either Mamba-2 or attention, in any order."""

    experiment = "llama3-8b"
    keys: ClassVar = {**d.SIZES, **d.NORMS, "tie_word_embeddings": d.TIED}
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu", "mamba_proj_bias": False}
    unused_keys: ClassVar = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")
    fraction: ClassVar = 1.0

    def layer_types(self, hf: Settings) -> list[str]:
        """Return the kind of each layer."""
        return r.read_kinds(hf, [r.RECURRENT] * hf.need("num_hidden_layers"))

    def settings(self, hf: Settings) -> Json:
        """Return settings for the two kinds of layers."""
        r.check_step_limit(hf)
        parts = {r.RECURRENT: r.read_mamba2(hf), r.ATTENTION: self.attention(hf)}
        return {d.ATTENTION: r.alternate(self.layer_types(hf), parts)}

    def attention(self, hf: Settings) -> Json:
        """Return the config of the layers with attention."""
        heads, rope = hf.need("num_attention_heads"), parameters(hf)
        fraction = rope.pop(FACTOR, self.fraction)
        return {
            "type": "attention", "num_heads": heads, "num_kv_heads": hf.get("num_key_value_heads", heads),
            "head_dim": hf.get("head_dim"), "position": read_rope(hf, rope=rope, fraction=fraction),
        }  # fmt: skip

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder = config.model.decoder
        kinds, mamba, attention = r.split_kinds(decoder, Mamba2.Config)
        keys: Json = {
            "layer_types": [r.PUBLISHED[kind] for kind in kinds], **r.write_mamba2(mamba, decoder.hidden_dim),
            "num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        }  # fmt: skip
        keys |= {"head_dim": attention.head_dim} if attention.head_dim else {}
        position = attention.position
        return keys | ({"rope_parameters": {**write_rope(position), FACTOR: position.fraction}} if position else {})

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data) if "rope_parameters" in data else {}


class GraniteHybrid(MambaHybrid):
    """Granite 4: factors for embeddings, scores, residual sums and logits, and optionally experts beside a shared one."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    keys: ClassVar = {
        **MambaHybrid.keys,
        "embedding_multiplier": Key("model.decoder.embedding.multiplier", default=1.0, read=float),
        "residual_multiplier": Key(f"{d.LAYER}.residual_multiplier", default=1.0, read=float),
        "logits_scaling": Key("model.decoder.output_multiplier", default=1.0, read=lambda n: 1 / n, write=lambda n: 1 / n),
    }  # fmt: skip
    rules: ClassVar = (
        *MAMBA_RULES,
        Rule(f"{FEED}.router.weight", f"{MOE}.router.layer.weight", "e d -> d e"),
        Rule((f"{FEED}.gate.weight", f"{FEED}.up.weight"), f"{MOE}.input_linear.weight", "e f* d -> e d f"),
        Rule(f"{FEED}.down.weight", f"{MOE}.output_linear.weight", "e d f -> e f d"),
        *(
            rule for ours in (FEED, f"{FEED}.shared") for rule in (
                Rule((f"{ours}.gate.weight", f"{ours}.up.weight"), f"{d.THEIRS}.shared_mlp.input_linear.weight", "f* d -> d f"),
                Rule(f"{ours}.down.weight", f"{d.THEIRS}.shared_mlp.output_linear.weight", "d f -> f d"),
            )
        ),
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts, if there are any."""
        count, router = hf.get("num_local_experts", 8), {"type": "softmax-router", "normalize": True}
        sizes = {"top_k": hf.get("num_experts_per_tok", 2), "hidden_dim": hf.get("intermediate_size", 11008)}
        return {"moe": {"num_experts": count, **sizes, "router": router}} if count else {}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the layers and the shared expert, which is the only one if there are no experts."""
        size, experts = hf.get("shared_intermediate_size", 1024), hf.get("num_local_experts", 8)
        shared = {"type": "gated-feed-forward", "hidden_dim": size}
        dense = {f"{d.FEED_FORWARD}.hidden_dim": size}
        return super().settings(hf) | ({f"{d.FEED_FORWARD}.shared": shared} if experts else dense)

    def attention(self, hf: Settings) -> Json:
        """Return the config of the layers with attention, which may have no position encoding."""
        attention = super().attention(hf) | {"scale": float(hf.get("attention_multiplier", 1.0))}
        return attention if hf.get("position_embedding_type") == "rope" else attention | {"position": None}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        keys, slot = super().export_keys(config), config.model.decoder.layer.feed_forward
        _, _, attention = r.split_kinds(config.model.decoder, Mamba2.Config)
        keys |= {"num_local_experts": 0, "shared_intermediate_size": slot.hidden_dim}
        if not isinstance(slot, GatedFeedForward.Config):
            keys |= {"num_local_experts": slot.num_experts, "num_experts_per_tok": slot.top_k}
            keys["shared_intermediate_size"] = slot.shared.hidden_dim
        return keys | {
            "intermediate_size": slot.hidden_dim,
            "attention_multiplier": attention.scale, "position_embedding_type": "rope" if attention.position else "nope",
        }  # fmt: skip


class Bamba(MambaHybrid):
    """Bamba: a feed-forward layer in every layer, and attention with half of each head rotated in a few layers."""

    architectures = ("BambaForCausalLM",)
    keys: ClassVar = {**MambaHybrid.keys, "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim"}
    fixed: ClassVar = {**MambaHybrid.fixed, "mlp_bias": False}
    fraction = 0.5
    rules: ClassVar = (
        *MAMBA_RULES, *d.feed_forward_rules(theirs="feed_forward"), Rule("decoder.norm.weight", "model.final_layernorm.weight"),
        Rule(f"{d.OURS}.feed_forward_norm.weight", f"{d.THEIRS}.pre_ff_layernorm.weight"),
    )  # fmt: skip

    def layer_types(self, hf: Settings) -> list[str]:
        """Return the kind of each layer."""
        return r.make_kinds(hf.need("num_hidden_layers"), hf.get("attn_layer_indices") or ())

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        keys = super().export_keys(config)
        return keys | {
            "attn_layer_indices": [i for i, kind in enumerate(keys.pop("layer_types")) if kind == "attention"]
        }
