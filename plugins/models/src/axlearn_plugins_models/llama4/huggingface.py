"""The text models of Llama 4 in Hugging Face format."""

from typing import Any, ClassVar

import attrs

from axlearn_core.config import patch
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import cycle_of, each_value, read_layer_types
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.alternate import Alternate

OURS, MOE = f"{d.OURS}.feed_forward", f"{d.THEIRS}.feed_forward"
CHUNKED, FULL = "chunked_attention", "full_attention"
CHUNK, ROTARY, STEP = "attention_chunk_size", "no_rope_layers", "interleave_moe_layer_step"


class Llama4(d.RopeDecoder):
    """Llama 4: attention in chunks, layers without positions whose queries are scaled, and experts in every nth layer."""

    experiment = "llama3-8b"
    architectures = ("Llama4ForCausalLM",)
    keys: ClassVar = {**d.SIZES, **d.HEADS, **d.NORMS, "tie_word_embeddings": d.TIED}
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    unused_keys = ("no_rope_layer_interval", "for_llm_compressor", "intermediate_size_mlp")
    rope, interleaved = attrs.evolve(ALL_LAYERS, theta=500_000.0), True
    rules: ClassVar = (
        *d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules("feed_forward", "feed_forward"),
        *d.feed_forward_rules("feed_forward.shared", "feed_forward.shared_expert"),
        Rule(f"{OURS}.router.weight", f"{MOE}.router.weight", "e d -> d e"),
        Rule((f"{OURS}.gate.weight", f"{OURS}.up.weight"), f"{MOE}.experts.gate_up_proj", "e d f* -> e d f"),
        Rule(f"{OURS}.down.weight", f"{MOE}.experts.down_proj", "e f d -> e f d"),
    )  # fmt: skip

    def rotary(self, hf: Settings) -> list[bool]:
        """Return whether each layer has a rotary encoding."""
        count, every = hf.need("num_hidden_layers"), hf.get("no_rope_layer_interval", 4)
        return [bool(x) for x in (hf.get(ROTARY) or [(i + 1) % every for i in range(count)])[:count]]

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts. Raise `ConfigError` if the layers with experts have another order."""
        step, count, layers = hf.get(STEP, 1), hf.need("num_hidden_layers"), hf.get("moe_layers")
        expected = [*range(step - 1, count, step)]
        if layers is not None and layers != expected:
            raise unsupported("moe_layers", layers, [str(expected)])
        router = {"type": "softmax-router", "score": {"type": "sigmoid-score"}, "normalize": False}
        return {"moe": {
            "num_experts": hf.need("num_local_experts"), "top_k": hf.get("num_experts_per_tok", 1), "every": step,
            "hidden_dim": hf.need("intermediate_size"), "shared_experts": 1, "router": router,
        }}  # fmt: skip

    def settings(self, hf: Settings) -> Json:
        """Return settings for positions, norms and chunks, which differ between layers, and for the experts."""
        settings, rotary, step = super().settings(hf), self.rotary(hf), hf.get(STEP, 1)
        default = [CHUNKED if rotates and hf.get(CHUNK, 8192) else FULL for rotates in rotary]
        kinds, size = read_layer_types(hf, lambda: default, (CHUNKED, FULL)), hf.get(CHUNK, 8192)
        norm = {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-5)), "weight": False}
        norm = norm if hf.get("use_qk_norm", True) else None
        rope = settings[f"{d.ATTENTION}.position"]
        tuning = {
            "type": "query-temperature",
            "interval": hf.get("floor_scale", 8192),
            "scale": hf.get("attn_scale", 0.1),
        }
        tuning = tuning if hf.get("attn_temperature_tuning", True) else None
        chunks = [{"type": "window", "size": size if kind == CHUNKED else None} for kind in kinds]
        paths = [f"{d.FEED_FORWARD}.children.{i}" for i in range(step - 1)]
        return {
            f"{d.ATTENTION}.position": cycle_of([rope if rotates else tuning for rotates in rotary]),
            f"{d.ATTENTION}.qk_norm": cycle_of([norm if rotates else None for rotates in rotary]),
            f"{d.ATTENTION}.qk_norm_last": norm is not None,
            f"{d.ATTENTION}.chunk": cycle_of(chunks),
            f"{d.FEED_FORWARD}.{f'children.{step - 1}.' if step > 1 else ''}weigh_inputs": True,
            **{f"{path}.hidden_dim": hf.get("intermediate_size_mlp", 16_384) for path in paths},
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        attention, slot = decoder.layer.attention, decoder.layer.feed_forward
        kinds: tuple[Any, ...] = slot.children if isinstance(slot, Alternate) else (slot,)
        experts, positions = kinds[-1], each_value(attention.position, decoder.num_layers)
        sizes = [value.size for value in each_value(attention.chunk, decoder.num_layers)]
        norms = each_value(attention.qk_norm, decoder.num_layers)
        rope = next((position for position in positions if isinstance(position, RotaryEmbedding.Config)), None)
        tuning = next((position for position in positions if position is not None and position != rope), None)
        return super().export_keys(patch(config, {f"{d.ATTENTION}.position": rope})) | {
            ROTARY: [int(position == rope) for position in positions],
            "layer_types": [FULL if size is None else CHUNKED for size in sizes],
            CHUNK: next((size for size in sizes if size is not None), None),
            "use_qk_norm": any(norm is not None for norm in norms),
            "attn_temperature_tuning": tuning is not None, STEP: len(kinds), "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k, "intermediate_size": experts.hidden_dim,
            "intermediate_size_mlp": kinds[0].hidden_dim,
            **({} if tuning is None else {"floor_scale": tuning.interval, "attn_scale": tuning.scale}),
        }  # fmt: skip
