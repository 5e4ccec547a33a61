"""LFM2 (arXiv 2511.23404) in Hugging Face format."""

from typing import Any, ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Family, Json, Settings
from axlearn_plugins_models.huggingface.layer_cycle import FULL, cycle_of, each_value, read_layer_types
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS, missing_forms, parameters, read_rope, write_rope
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_recurrent.gated_convolution import GatedConvolution

CONVOLUTION, OURS = "conv", f"{d.OURS}.attention"
ATTENTION_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
INPUTS, OUTPUT = tuple(f"{OURS}.{part}" for part in ("input_gate", "gate", "value")), f"{OURS}.output"


def _rename(rule: Rule) -> Rule:
    parts = [ATTENTION_NAMES.get(part, part) for part in rule.theirs.split(".")]
    return attrs.evolve(rule, theirs=".".join(parts))


class Lfm2(Family):
    """LFM2: each layer has either a gated short convolution or attention, in any order."""

    experiment = "llama3-8b"
    architectures = ("Lfm2ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, "norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-5),
        "tie_embedding|tie_word_embeddings": attrs.evolve(d.TIED, default=True),
    }  # fmt: skip
    fixed: ClassVar = {"block_use_swiglu": True, "use_pos_enc": True}
    unused_keys = (
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init", "conv_dim",
        "conv_dim_out", "conv_use_xavier_init", "num_heads",
    )  # fmt: skip
    rope = attrs.evolve(ALL_LAYERS, theta=1_000_000.0)
    rules: ClassVar = (
        *d.OUTER_RULES, Rule("decoder.norm.weight", "model.embedding_norm.weight"),
        Rule(f"{d.OURS}.attention_norm.weight", f"{d.THEIRS}.operator_norm.weight"),
        Rule(f"{d.OURS}.feed_forward_norm.weight", f"{d.THEIRS}.ffn_norm.weight"),
        *map(_rename, d.ATTENTION_RULES),
        *d.feed_forward_rules(theirs="feed_forward", names={"gate": "w1", "up": "w3", "down": "w2"}),
        *(
            rule for kind, axes in (("weight", "f* d -> d f"), ("bias", "f* -> f")) for rule in (
                Rule(tuple(f"{part}.{kind}" for part in INPUTS), f"{d.THEIRS}.conv.in_proj.{kind}", axes, within=GatedConvolution),
                Rule(f"{OUTPUT}.{kind}", f"{d.THEIRS}.conv.out_proj.{kind}", axes.replace("*", ""), within=GatedConvolution),
            )
        ),
        Rule(f"{OURS}.convolution.weight", f"{d.THEIRS}.conv.conv.weight", "f 1 w -> w f"),
        Rule(f"{OURS}.convolution.bias", f"{d.THEIRS}.conv.conv.bias"),
    )  # fmt: skip

    def kinds(self, hf: Settings) -> list[str]:
        """Return the kind of each layer."""
        count = hf.need("num_hidden_layers")
        attention = hf.get("full_attn_idxs")
        attention = range(count) if attention is None else attention
        default = [FULL if i in attention else CONVOLUTION for i in range(count)]
        return read_layer_types(hf, lambda: default, (FULL, CONVOLUTION))

    def hidden_dim(self, hf: Settings) -> int:
        """Return the size of the feed-forward layers, which the file may state indirectly."""
        size, factor, multiple = hf.need("block_ff_dim|intermediate_size"), hf.get("block_ffn_dim_multiplier", 1.0), 1
        if hf.get("block_auto_adjust_ff_dim", True):
            size = int(2 * size / 3)
            if factor is not None:
                size, multiple = int(factor * size), hf.get("block_multiple_of", 256)
        return -(-size // multiple) * multiple

    def settings(self, hf: Settings) -> Json:
        """Return settings for the two kinds of layers and the feed-forward layers."""
        linear = {"type": "linear", "bias": hf.get("conv_bias", False)}
        width, bias = hf.get("conv_L_cache", 3), linear["bias"]
        heads, norm = hf.need("num_attention_heads"), {"type": "rms-norm", "eps": float(hf.get("norm_eps", 1e-5))}
        parts: Json = {
            CONVOLUTION: {"type": "gated-convolution", **dict.fromkeys(("input_gate", "gate", "value", "output"), linear),
                          "convolution": {"type": "short-convolution", "width": width, "bias": bias, "activation": None}},
            FULL: {"type": "attention", "num_heads": heads, "num_kv_heads": hf.get("num_key_value_heads", 8),
                   "head_dim": hf.get("head_dim"), "qk_norm": norm,
                   "position": read_rope(hf, rope=parameters(hf, self.rope))},
        }  # fmt: skip
        return {
            d.ATTENTION: cycle_of([parts[kind] for kind in self.kinds(hf)]),
            f"{d.FEED_FORWARD}.hidden_dim": self.hidden_dim(hf),
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder = config.model.decoder
        layers = each_value(decoder.layer.attention, decoder.num_layers)
        kinds = [CONVOLUTION if isinstance(layer, GatedConvolution.Config) else FULL for layer in layers]
        first = dict(zip(reversed(kinds), reversed(layers), strict=True))
        keys: Json = {"layer_types": kinds, "intermediate_size": decoder.layer.feed_forward.hidden_dim,
                      "block_auto_adjust_ff_dim": False}  # fmt: skip
        if (layer := first.get(CONVOLUTION)) is not None:
            keys |= {"conv_L_cache": layer.convolution.width, "conv_bias": layer.convolution.bias}
        if (attention := first.get(FULL)) is not None:
            keys |= {"num_attention_heads": attention.num_heads, "rope_parameters": write_rope(attention.position)}
            keys["num_key_value_heads"] = attention.num_kv_heads or attention.num_heads
            keys |= {"head_dim": attention.head_dim} if attention.head_dim else {}
        return keys

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data, (self.rope,)) if "rope_parameters" in data else {}
