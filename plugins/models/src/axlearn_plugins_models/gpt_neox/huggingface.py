"""GPT-NeoX (arXiv 2204.06745) and Pythia in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.table import Rule

THEIRS = "gpt_neox.layers.{layer}"
BIASED = {"type": "linear", "bias": True}
ATTENTION, FUSED = f"{d.OURS}.attention", ("query", "key", "value")


class GptNeoX(d.RopeDecoder):
    """GPT-NeoX: parallel halves with a norm each, partial rotary positions, and biases everywhere."""

    experiment = "llama3-8b"
    architectures = ("GPTNeoXForCausalLM",)
    norm: ClassVar = {"type": "layer-norm"}
    feed_forward: ClassVar = {"type": "feed-forward", "up": BIASED, "down": BIASED}
    parallel = True
    shared_norm = False
    prefix = "gpt_neox."
    keys: ClassVar = d.with_defaults(
        {
            **d.SIZES,
            **d.DENSE,
            "num_attention_heads": Key((f"{d.ATTENTION}.num_heads", f"{d.ATTENTION}.num_kv_heads")),
            "layer_norm_eps": d.norm_key(1e-5),
            "tie_word_embeddings": d.TIED,
            "attention_bias": d.bias_key(True, *d.QKVO),
        },
        hidden_act="gelu",
    )
    unused_keys = ("hidden_dropout", "classifier_dropout")
    ignored = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")
    copies: ClassVar = {"embed_out.weight": "gpt_neox.embed_in.weight"}
    rope = attrs.evolve(ALL_LAYERS, base="rotary_emb_base", share="rotary_pct")
    fraction = 0.25
    rules = (
        Rule("decoder.embedding.weight", "gpt_neox.embed_in.weight"),
        Rule("decoder.head.weight", "embed_out.weight", "v d -> d v"),
        *(Rule(f"decoder.norm.{part}", f"gpt_neox.final_layer_norm.{part}") for part in ("weight", "bias")),
        *d.norm_rules(
            {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}, THEIRS
        ),
        *d.feed_forward_rules(layer=THEIRS, names=("", "dense_h_to_4h", "dense_4h_to_h")),
        Rule(
            tuple(f"{ATTENTION}.{part}.weight" for part in FUSED),
            f"{THEIRS}.attention.query_key_value.weight",
            "(n h*) d -> d n h",
        ),
        Rule(
            tuple(f"{ATTENTION}.{part}.bias" for part in FUSED),
            f"{THEIRS}.attention.query_key_value.bias",
            "(n h*) -> n h",
        ),
        Rule(f"{ATTENTION}.output.weight", f"{THEIRS}.attention.dense.weight", "d (n h) -> n h d"),
        Rule(f"{ATTENTION}.output.bias", f"{THEIRS}.attention.dense.bias"),
    )
