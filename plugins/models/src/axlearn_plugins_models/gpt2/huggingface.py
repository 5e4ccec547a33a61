"""GPT-2 (Radford et al., 2019) in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.table import Rule

THEIRS, NORM = "transformer.h.{layer}", "decoder.layer.{}_norm"
NORMS = {NORM.format("attention"): f"{THEIRS}.ln_1", NORM.format("feed_forward"): f"{THEIRS}.ln_2"}
MAPS = {"attention.output": "attn.c_proj", "feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
SAME = {**NORMS, "decoder.norm": "transformer.ln_f", **{f"{d.OURS}.{a}": f"{THEIRS}.{b}" for a, b in MAPS.items()}}
FUSED = ("query", "key", "value")
LINEAR = {"type": "linear", "bias": True}


class GPT2(Family):
    """GPT-2: learned positions, LayerNorm, biases everywhere, and fused queries, keys and values."""

    experiment = "llama3-8b"
    architectures = ("GPT2LMHeadModel",)
    prefix = "transformer."
    keys: ClassVar = {
        "vocab_size": "model.vocab_size", "n_layer": "model.decoder.num_layers", "n_embd": "model.decoder.hidden_dim",
        "n_head": Key((f"{d.ATTENTION}.num_heads", f"{d.ATTENTION}.num_kv_heads")),
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
    }  # fmt: skip
    fixed: ClassVar = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    }  # fmt: skip
    unused_keys = ("reorder_and_upcast_attn",)
    ignored = ("*.attn.bias", "*.attn.masked_bias")
    copies: ClassVar = {"lm_head.weight": "transformer.wte.weight"}
    rules = (
        Rule("decoder.embedding.weight", "transformer.wte.weight"),
        Rule("decoder.position.weight", "transformer.wpe.weight"),
        Rule("decoder.head.weight", "lm_head.weight", "v d -> d v"),
        *(Rule(f"{a}.{part}", f"{b}.{part}") for a, b in SAME.items() for part in ("weight", "bias")),
        Rule(f"{d.OURS}.attention.output.weight", f"{THEIRS}.attn.c_proj.weight", "(n h) d -> n h d"),
        Rule(tuple(f"{d.OURS}.attention.{p}.weight" for p in FUSED), f"{THEIRS}.attn.c_attn.weight", "d (n* h) -> d n h"),
        Rule(tuple(f"{d.OURS}.attention.{p}.bias" for p in FUSED), f"{THEIRS}.attn.c_attn.bias", "(n* h) -> n h"),
    )  # fmt: skip

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms, feed-forward layers, biases and positions."""
        if (name := hf.get("activation_function", "gelu_new")) not in d.ACTIVATIONS:
            raise unsupported("activation_function", name, d.ACTIVATIONS)
        norm = {"type": "layer-norm", "eps": float(hf.get("layer_norm_epsilon", 1e-5))}
        hidden, kind = hf.get("n_inner") or 4 * hf.need("n_embd"), d.ACTIVATIONS[name]
        plain = {"type": "feed-forward", "hidden_dim": hidden, "activation": kind, "up": LINEAR, "down": LINEAR}
        settings = {
            f"{d.LAYER}.norm": norm,
            "model.decoder.norm": norm,
            d.FEED_FORWARD: plain,
            f"{d.ATTENTION}.position": None,
        }
        settings["model.decoder.position"] = {"type": "learned-positions", "max_length": hf.need("n_positions")}
        return settings | {f"{d.ATTENTION}.{part}.bias": True for part in (*FUSED, "output")}

    def export_keys(self, config: Any) -> Json:
        """Invert `settings`."""
        decoder = config.model.decoder
        dense = decoder.layer.feed_forward
        name = next((k for k, v in reversed(d.ACTIVATIONS.items()) if v == dense.activation), None)
        fields = {"n_inner": dense.hidden_dim, "activation_function": name, "n_positions": decoder.position.max_length}
        return fields | {"layer_norm_epsilon": decoder.norm.eps}
