"""Gemma, Gemma 2 and the text models of Gemma 3 in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import FULL, window_types
from axlearn_plugins_models.huggingface.rope import Kind, missing_forms, parameters, read_rope, write_rope
from axlearn_plugins_models.huggingface.table import Rule

NORMS = {"attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
         "feed_forward_norm": "pre_feedforward_layernorm", "feed_forward_post_norm": "post_feedforward_layernorm"}  # fmt: skip
PATTERN = "sliding_window_pattern|_sliding_window_pattern"


class Gemma(d.RopeDecoder):
    """Gemma: a Llama with scaled embeddings, and norms with an offset."""

    experiment = "llama3-8b"
    architectures = ("GemmaForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys, "attention_bias": d.ATTENTION_BIAS,
        "num_key_value_heads": Key(f"{d.ATTENTION}.num_kv_heads", default=16),
        "head_dim": Key(f"{d.ATTENTION}.head_dim", default=256),
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
        # Early files have "gelu". It also means the approximation.
        "hidden_act": Key(f"{d.FEED_FORWARD}.activation", default="gelu_pytorch_tanh",
                          values={"gelu_pytorch_tanh": "gelu_tanh", **d.ACTIVATIONS, "gelu": "gelu_tanh"}),
        "use_bidirectional_attention": Key(f"{d.ATTENTION}.causal", default=None, values={None: True, False: True}),
    }  # fmt: skip
    unused_keys = ("hidden_activation",)
    norm: ClassVar = {"type": "rms-norm", "offset": 1.0}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding, the norms and the scaled embeddings."""
        return super().settings(hf) | {"model.decoder.embedding.scale": True}


class Gemma2(Family):
    """Gemma 2: norms around each half of a layer, capped scores and logits, and a window in every second layer."""

    experiment = "llama3-8b"
    architectures: ClassVar = ("Gemma2ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
        "hidden_activation": Key(f"{d.FEED_FORWARD}.activation", default="gelu_pytorch_tanh", values=d.ACTIVATIONS),
        "query_pre_attn_scalar": Key(f"{d.ATTENTION}.scale", read=lambda n: n**-0.5, write=lambda s: round(s**-2)),
        "attn_logit_softcapping": Key(f"{d.ATTENTION}.softcap", default=None, read=float),
        "final_logit_softcapping": Key("model.logit_softcap", default=None, read=float),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False}
    unused_keys: ClassVar = ("hidden_act", "use_bidirectional_attention")
    rules: ClassVar = (*d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
                       *(Rule(f"{d.OURS}.{a}.weight", f"{d.THEIRS}.{b}.weight") for a, b in NORMS.items()))  # fmt: skip
    every: ClassVar = 2

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the sliding windows."""
        interval, count = hf.get(PATTERN, self.every), hf.need("num_hidden_layers")
        kinds = ["sliding_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
        if (layer_types := hf.get("layer_types") or kinds) != kinds:
            raise unsupported("layer_types", layer_types, [str(kinds)])
        return {"interleave": {"every": interval, "window": hf.need("sliding_window")}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for norms with an offset, scaled embeddings, and the position encoding."""
        norm = {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6)), "offset": 1.0}
        norms = dict.fromkeys((f"{d.LAYER}.norm", f"{d.LAYER}.post_norm", "model.decoder.norm"), norm)
        return {**norms, "model.decoder.embedding.scale": True, f"{d.ATTENTION}.position": self.position(hf)}

    def position(self, hf: Settings) -> Json:
        """Return the config of the position encoding."""
        return read_rope(hf)

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        windows = decoder.layer.attention.window
        types, size = window_types(windows, decoder.num_layers)
        fields = {"rms_norm_eps": decoder.norm.eps, "sliding_window": size, "layer_types": types}
        return fields | {
            "rope_parameters": self.rope_parameters(decoder.layer.attention),
            "_sliding_window_pattern": types.index(FULL) + 1 if FULL in types else len(windows.children),
        }

    def rope_parameters(self, attention: Any) -> Json:
        """Return the RoPE parameters of the position encoding."""
        return write_rope(attention.position)

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data)


KINDS = (
    Kind("sliding_attention", "rope_local_base_freq", 10_000.0, scaled=False),
    Kind("full_attention", "rope_theta", 1_000_000.0, scaled=True),
)
"""Kinds of layers in Gemma 3. If a file has no theta, the default of transformers applies."""


class Gemma3(Gemma2):
    """Gemma 3: per-head norms instead of caps, and global attention in every sixth layer, with its own frequencies."""

    architectures = ("Gemma3ForCausalLM",)
    every = 6

    def settings(self, hf: Settings) -> Json:
        """Return Gemma 2's settings plus the per-head norm."""
        settings = super().settings(hf)
        return settings | {f"{d.ATTENTION}.qk_norm": settings[f"{d.LAYER}.norm"]}

    def position(self, hf: Settings) -> Json:
        """Return the position encodings for both kinds of layers."""
        near, wide = (read_rope(hf, rope=parameters(hf, kind, KINDS)) for kind in KINDS)
        return {"type": "alternate", "children": [*[near] * (hf.get(PATTERN, self.every) - 1), wide]}

    def rope_parameters(self, attention: Any) -> Json:
        """Return the RoPE parameters for both kinds of layers."""
        near, *_, wide = map(write_rope, attention.position.children)
        return {"full_attention": wide, "sliding_attention": near}

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other transformers versions need, for both kinds of layers."""
        return missing_forms(data, KINDS)
