"""The text models of Gemma 4 in Hugging Face format."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from axlearn_plugins_models.gemma.huggingface import NORMS
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import (
    FULL,
    SLIDING,
    each_value,
    led_cycle_of,
    periodic_types,
    read_layer_types,
)
from axlearn_plugins_models.huggingface.rope import FACTOR, PROPORTIONAL, Kind, parameters, read_rope
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_models.huggingface.windowed import attention_keys

SHARED, DOUBLE, PER_LAYER = "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input"
LAYERS = "per_layer_config"
ACTIVATION = Key("", default="gelu_pytorch_tanh", values=d.ACTIVATIONS)
KINDS = (
    Kind(SLIDING, "rope_local_base_freq", 10_000.0, scaled=False),
    Kind(FULL, "rope_theta", 1_000_000.0, scaled=False),
)
ROPE = {SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": PROPORTIONAL, FACTOR: 0.25, "rope_theta": 1_000_000.0}}  # fmt: skip
"""`rope_parameters` of a file without them."""

GATE, SECOND = f"{d.OURS}.per_layer_gate", f"{d.OURS}.second_feed_forward"
SAME_AXES = {
    "output_scale": "layer_scalar", "per_layer_gate.norm.weight": "post_per_layer_input_norm.weight",
    "second_feed_forward.router.norm.weight": "router.scale",
    "second_feed_forward.router.expert_scale": "router.per_expert_scale",
    "second_feed_forward.norm.weight": "pre_feedforward_layernorm_2.weight",
    "feed_forward_branch_norm.weight": "post_feedforward_layernorm_1.weight",
    "second_branch_norm.weight": "post_feedforward_layernorm_2.weight",
}  # fmt: skip
"""Tensors of a layer with the same axes in files: ours -> Hugging Face's."""
PER_LAYER_RULES = (
    Rule("decoder.per_layer.embedding.weight", "model.embed_tokens_per_layer.weight"),
    Rule("decoder.per_layer.projection.weight", "model.per_layer_model_projection.weight", "p d -> d p"),
    Rule("decoder.per_layer.norm.weight", "model.per_layer_projection_norm.weight"),
    Rule(f"{GATE}.gate.weight", f"{d.THEIRS}.per_layer_input_gate.weight", "p d -> d p"),
    Rule(f"{GATE}.project.weight", f"{d.THEIRS}.per_layer_projection.weight", "d p -> p d"),
)


class Gemma4(Family):
    """Gemma 4: global layers with larger heads, and optionally shared keys, per-layer embeddings, and experts next to each MLP."""

    experiment = "llama3-8b"
    architectures: ClassVar = ("Gemma4ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
        "final_logit_softcapping": Key("model.logit_softcap", default=None, read=float),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False}
    unused_keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(), *PER_LAYER_RULES,
        *(Rule(f"{d.OURS}.{a}.weight", f"{d.THEIRS}.{b}.weight") for a, b in NORMS.items()),
        *(Rule(f"{d.OURS}.{a}", f"{d.THEIRS}.{b}") for a, b in SAME_AXES.items()),
        Rule(f"{SECOND}.router.weight", f"{d.THEIRS}.router.proj.weight", "e d -> d e"),
        Rule((f"{SECOND}.gate.weight", f"{SECOND}.up.weight"), f"{d.THEIRS}.experts.gate_up_proj", "e f* d -> e d f"),
        Rule(f"{SECOND}.down.weight", f"{d.THEIRS}.experts.down_proj", "e d f -> e f d"),
    )  # fmt: skip

    def kinds(self, hf: Settings) -> list[str]:
        """Return the kind of each layer. The last one is always global, even if the file differs."""
        return [*read_layer_types(hf, lambda: periodic_types(hf, 6))[:-1], FULL]

    def first_shared(self, hf: Settings, kinds: Sequence[str]) -> int:
        """Return how many layers have keys. Raise `ConfigError` if they lack a kind that later layers need."""
        shared = hf.get(SHARED, 0)
        if not 0 <= shared < len(kinds) or {*kinds[: len(kinds) - shared]} != {*kinds}:
            raise unsupported(SHARED, shared, ["a number that leaves a layer of each kind with keys of its own"])
        return len(kinds) - shared

    def sizes(self, hf: Settings, kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the number of key-value heads and the size of a head, for each kind of layer."""
        heads, size = hf.get("num_key_value_heads", 4), hf.get("head_dim", 256)
        wide_heads, wide = hf.get("num_global_key_value_heads") or heads, hf.get("global_head_dim", 512)
        wide_heads = wide_heads if hf.get("attention_k_eq_v", False) else heads
        layers = hf.get(LAYERS)
        if layers is None:
            return {SLIDING: (heads, size), FULL: (wide_heads, wide)}
        by_kind: dict[str, set[tuple[int, int]]] = {SLIDING: set(), FULL: set()}
        for i, kind in enumerate(kinds):
            layer: Mapping[str, Any] = layers.get(str(i), {})
            by_kind[kind].add((layer.get("num_key_value_heads", heads), layer.get("head_dim", size)))
            if layer.keys() - {"num_key_value_heads", "head_dim"} or len(by_kind[kind]) > 1:
                raise unsupported(LAYERS, layers, ["num_key_value_heads and head_dim, equal in all layers of a kind"])
        return {kind: next(iter(sizes), (heads, size)) for kind, sizes in by_kind.items()}

    def attention(self, hf: Settings, kinds: Sequence[str], norm: Json) -> list[Json]:
        """Return the config of each layer's attention."""
        first, sizes, window = self.first_shared(hf, kinds), self.sizes(hf, kinds), hf.get("sliding_window", 512)
        sources = (
            {kind: max(i for i in range(first) if kinds[i] == kind) for kind in {*kinds}} if first < len(kinds) else {}
        )
        ropes = {k.name: parameters(hf, k, KINDS) if hf.get("rope_parameters") else ROPE[k.name] for k in KINDS}
        layers = []
        for i, kind in enumerate(kinds):
            heads, size = sizes[kind]
            layer = {
                "type": "attention", "num_heads": hf.get("num_attention_heads", 8), "num_kv_heads": heads, "head_dim": size,
                "scale": 1.0, "qk_norm": norm, "position": read_rope(hf, rope=ropes[kind]),
                "window": window if kind == SLIDING else None,
            }  # fmt: skip
            if i >= first:
                layer |= {"key": None, "value": None, "kv_source": kind}
            else:
                layer |= {"value_norm": {**norm, "weight": False}}
                layer |= {"value": None} if kind == FULL and hf.get("attention_k_eq_v", False) else {}
                layer |= {"kv_name": kind} if sources.get(kind) == i else {}
            layers.append(layer)
        return layers

    def settings(self, hf: Settings) -> Json:
        """Return settings for the layers and the per-layer embeddings."""
        if (direction := hf.get("use_bidirectional_attention")) not in (None, "vision"):
            raise unsupported("use_bidirectional_attention", direction, ["null", "vision, which does not affect text"])
        kinds, norm = self.kinds(hf), {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6))}
        activation, size = ACTIVATION.ours("hidden_activation", hf), hf.need("intermediate_size")
        wide = self.first_shared(hf, kinds) if hf.get(DOUBLE, False) else len(kinds)
        feed_forward = {"type": "gated-feed-forward", "activation": activation}
        layer = {"type": "extended-transformer-layer", "norm": norm, "post_norm": norm, "output_scale": True}
        settings = {
            d.LAYER: layer, "model.decoder.norm": norm, "model.decoder.embedding.scale": True,
            d.ATTENTION: led_cycle_of(self.attention(hf, kinds, norm)),
            d.FEED_FORWARD: led_cycle_of([feed_forward | {"hidden_dim": size * (1 + (i >= wide))} for i in range(len(kinds))]),
        }  # fmt: skip
        vocabulary = hf.get("vocab_size_per_layer_input", 262_144)
        if dim := hf.get(PER_LAYER, 256):
            if vocabulary != hf.need("vocab_size"):
                raise unsupported("vocab_size_per_layer_input", vocabulary, [hf["vocab_size"]])
            settings["model.decoder.per_layer"] = {"type": "per-layer-embedding", "dim": dim, "norm": norm}
            layer["per_layer_gate"] = {"type": "per-layer-gate", "dim": dim, "activation": activation, "norm": norm}
        if hf.get("enable_moe_block", False):
            layer["branch_norm"] = norm
            layer["second_feed_forward"] = {
                "type": "mixture-of-experts", "num_experts": hf.need("num_experts"), "top_k": hf.need("top_k_experts"),
                "hidden_dim": hf.need("moe_intermediate_size"), "activation": activation, "norm": norm,
                "router": {"type": "softmax-router", "normalize": True, "norm": norm, "expert_scale": True,
                           "logit_multiplier": {"type": "width-multiplier", "base_width": 1, "exponent": -0.5}},
            }  # fmt: skip
        return settings

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder, layer = config.model.decoder, config.model.decoder.layer
        attention, widths = (each_value(slot, decoder.num_layers) for slot in (layer.attention, layer.feed_forward))
        keys = attention_keys(attention)
        wide = attention[keys["layer_types"].index(FULL)]
        experts = layer.second_feed_forward
        same = any(one.value is None and one.key is not None for one in attention)
        return {
            **keys, "rms_norm_eps": decoder.norm.eps, "attention_k_eq_v": same,
            "global_head_dim": wide.head_dim, "num_global_key_value_heads": wide.num_kv_heads if same else None,
            "intermediate_size": widths[0].hidden_dim, DOUBLE: widths[-1].hidden_dim != widths[0].hidden_dim,
            "hidden_activation": d.ACTIVATION_NAMES[widths[0].activation],
            PER_LAYER: decoder.per_layer.dim if decoder.per_layer else 0,
            "vocab_size_per_layer_input": config.model.vocab_size, "enable_moe_block": experts is not None,
            **({} if experts is None else {"num_experts": experts.num_experts, "top_k_experts": experts.top_k,
                                           "moe_intermediate_size": experts.hidden_dim}),
        }  # fmt: skip

    def ignored_tensors(self, hf: Settings) -> Sequence[str]:
        """Return patterns of ignored tensors. They include the keys and values of layers with shared ones."""
        count, shared = hf.need("num_hidden_layers"), hf.get(SHARED, 0)
        layers = (f"model.layers.{i}.self_attn.{part}" for i in range(count - shared, count) for part in "kv")
        return (*super().ignored_tensors(hf), *(f"{layer}_{part}.*" for layer in layers for part in ("proj", "norm")))
