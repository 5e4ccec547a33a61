"""OLMo 2, 3 and Hybrid in Hugging Face format."""

from collections.abc import Mapping
from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface import recurrent_layers as r
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.layer_cycle import FULL, SLIDING, cycle_of, each_value, window_types
from axlearn_plugins_models.huggingface.rope import Kind, missing_forms, parameters, read_rope, write_rope
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_models.huggingface.windowed import WindowedDecoder
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet

EPS = Key(
    (f"{d.LAYER}.post_norm.eps", "model.decoder.norm.eps", f"{d.ATTENTION}.qk_norm.eps"), default=1e-5, read=float
)


class Olmo2(d.RopeDecoder):
    """OLMo 2: norms after each half of a layer instead of before it, and over all heads of queries and keys."""

    experiment = "llama3-8b"
    architectures = ("Olmo2ForCausalLM",)
    keys: ClassVar = {**d.SIZES, **d.HEADS, **d.DENSE, "tie_word_embeddings": d.TIED, "rms_norm_eps": EPS}
    fixed: ClassVar = {"attention_bias": False}
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
        Rule(f"{d.OURS}.attention_post_norm.weight", f"{d.THEIRS}.post_attention_layernorm.weight"),
        Rule(f"{d.OURS}.feed_forward_post_norm.weight", f"{d.THEIRS}.post_feedforward_layernorm.weight"),
    )  # fmt: skip
    qk_norm_over: ClassVar[str] = "all_heads"

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the norms."""
        norm = {"type": "rms-norm"}
        norms = {f"{d.LAYER}.norm": None, f"{d.LAYER}.post_norm": norm, f"{d.ATTENTION}.qk_norm": norm}
        return super().settings(hf) | {**norms, f"{d.ATTENTION}.qk_norm_over": self.qk_norm_over}


KINDS = (Kind(SLIDING, "rope_theta", 500_000.0, scaled=False), Kind(FULL, "rope_theta", 500_000.0, scaled=True))
"""Only layers with global attention scale their frequencies."""


class Olmo3(Olmo2, WindowedDecoder):
    """OLMo 3: OLMo 2 with windows in three of four layers."""

    architectures = ("Olmo3ForCausalLM",)

    def position(self, hf: Settings) -> Json:
        """Return the position encodings of both kinds of layers."""
        encodings = {kind.name: read_rope(hf, rope=parameters(hf, kind, KINDS)) for kind in KINDS}
        return cycle_of([encodings[kind] for kind in self.kinds(hf)])

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder = config.model.decoder
        attention, count = decoder.layer.attention, decoder.num_layers
        kinds, size = window_types(attention.window, count)
        positions = dict(zip(kinds, each_value(attention.position, count), strict=True))
        positions = {kind.name: positions.get(kind.name) or positions[kinds[0]] for kind in KINDS}
        ropes = {name: write_rope(position) for name, position in positions.items()}
        return {"layer_types": kinds, "sliding_window": size, "rope_parameters": ropes}

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data, KINDS)


OURS, LINEAR = f"{d.OURS}.attention", f"{d.THEIRS}.linear_attn"


class OlmoHybrid(Family):
    """OLMo Hybrid: gated DeltaNet after norms in most layers, and attention as in OLMo 2 in the others."""

    experiment = "llama3-8b"
    architectures = ("OlmoHybridForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.DENSE, "tie_word_embeddings": d.TIED,
        "rms_norm_eps": Key("model.decoder.norm.eps", default=1e-6, read=float),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    unused_keys = ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
    rules: ClassVar = (
        *Olmo2.rules, *r.kimi_delta_rules(LINEAR),
        Rule(f"{d.OURS}.attention_norm.weight", f"{d.THEIRS}.attention_layer_norm.weight"),
        Rule(f"{d.OURS}.feed_forward_norm.weight", f"{d.THEIRS}.feedforward_layer_norm.weight"),
        Rule(f"{OURS}.decay.weight", f"{LINEAR}.a_proj.weight", "n d -> d n"),
        Rule(f"{OURS}.gate.weight", f"{LINEAR}.g_proj.weight", "(n h) d -> d n h"),
        Rule(f"{OURS}.log_rate", f"{LINEAR}.A_log"),
        Rule(f"{OURS}.time_bias", f"{LINEAR}.dt_bias"),
    )  # fmt: skip

    def position(self, hf: Settings) -> Json | None:
        """Return the config of the position encoding, which published models do not have."""
        written = hf.get("rope_parameters")
        without_theta = isinstance(written, Mapping) and written.get("rope_theta", 0) is None
        return None if without_theta else read_rope(hf)

    def settings(self, hf: Settings) -> Json:
        """Return settings for the two kinds of layers."""
        count, width, heads = hf.need("num_hidden_layers"), hf.need("hidden_size"), hf.need("num_attention_heads")
        kinds = r.read_kinds(hf, r.make_kinds(count, range(3, count, 4) or [count - 1]))
        norm = {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6))}
        keys = hf.get("linear_num_key_heads") or heads
        size = hf.get("linear_key_head_dim") or int(0.75 * width / keys)
        delta = {
            "type": "gated-delta-net", "num_heads": hf.get("linear_num_value_heads") or heads, "num_key_heads": keys,
            "key_dim": size, "value_dim": hf.get("linear_value_head_dim") or 2 * size,
            "strength_scale": 2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0, "norm": norm | {"eps": 1e-5},
            "convolution": {"type": "short-convolution", "width": hf.get("linear_conv_kernel_dim", 4)},
        }  # fmt: skip
        attention = {
            "type": "attention", "num_heads": heads, "num_kv_heads": hf.get("num_key_value_heads") or heads,
            "head_dim": hf.get("head_dim"), "position": self.position(hf), "qk_norm": norm, "qk_norm_over": "all_heads",
        }  # fmt: skip
        return {
            d.ATTENTION: r.alternate(kinds, {r.RECURRENT: delta, r.ATTENTION: attention}),
            f"{d.LAYER}.norm": cycle_of([norm if kind == r.RECURRENT else None for kind in kinds]),
            f"{d.LAYER}.post_norm": cycle_of([norm if kind == r.ATTENTION else None for kind in kinds]),
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        kinds, delta, attention = r.split_kinds(config.model.decoder, GatedDeltaNet.Config)
        keys: Json = {
            "layer_types": kinds, "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
            "linear_num_value_heads": delta.num_heads, "linear_num_key_heads": delta.num_key_heads or delta.num_heads,
            "linear_key_head_dim": delta.key_dim, "linear_value_head_dim": delta.value_dim or delta.key_dim,
            "linear_conv_kernel_dim": delta.convolution.width, "linear_allow_neg_eigval": delta.strength_scale == 2,
            "rope_parameters": write_rope(attention.position) if attention.position else {"rope_theta": None},
        }  # fmt: skip
        return keys | ({"head_dim": attention.head_dim} if attention.head_dim else {})

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data) if data["rope_parameters"]["rope_theta"] else {}
