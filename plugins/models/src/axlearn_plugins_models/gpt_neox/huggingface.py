"""GPT-NeoX (arXiv 2204.06745) and Pythia in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key, Settings
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.table import Rule

BIASED = {"type": "linear", "bias": True}
ATTENTION, THEIRS = f"{d.OURS}.attention", "gpt_neox.layers.{layer}"
FUSED, JOINED = ("query", "key", "value"), f"{THEIRS}.attention.query_key_value"


class GptNeoX(d.RopeDecoder):
    """GPT-NeoX: parallel halves with a norm each, partial rotary positions, and biases everywhere."""

    experiment = "llama3-8b"
    architectures = ("GPTNeoXForCausalLM",)
    prefix = "gpt_neox."
    keys: ClassVar = {
        **d.SIZES, **d.DENSE, "tie_word_embeddings": d.TIED,
        "num_attention_heads": Key((f"{d.ATTENTION}.num_heads", f"{d.ATTENTION}.num_kv_heads")),
        "attention_bias": attrs.evolve(d.ATTENTION_BIAS, default=True),
        "hidden_act": attrs.evolve(d.DENSE["hidden_act"], default="gelu"),
        "layer_norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-5),
    }  # fmt: skip
    unused_keys = ("hidden_dropout", "classifier_dropout")
    ignored = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")
    copies: ClassVar = {"embed_out.weight": "gpt_neox.embed_in.weight"}
    rules = (
        Rule("decoder.embedding.weight", "gpt_neox.embed_in.weight"),
        Rule("decoder.head.weight", "embed_out.weight", "v d -> d v"),
        *(Rule(f"decoder.norm.{part}", f"gpt_neox.final_layer_norm.{part}") for part in ("weight", "bias")),
        *d.norm_rules(THEIRS),
        *d.feed_forward_rules(layer=THEIRS, names={"up": "dense_h_to_4h", "down": "dense_4h_to_h"}),
        Rule(tuple(f"{ATTENTION}.{part}.weight" for part in FUSED), f"{JOINED}.weight", "(n h*) d -> d n h"),
        Rule(tuple(f"{ATTENTION}.{part}.bias" for part in FUSED), f"{JOINED}.bias", "(n h*) -> n h"),
        Rule(f"{ATTENTION}.output.weight", f"{THEIRS}.attention.dense.weight", "d (n h) -> n h d"),
        Rule(f"{ATTENTION}.output.bias", f"{THEIRS}.attention.dense.bias"),
    )
    rope = attrs.evolve(ALL_LAYERS, base="rotary_emb_base", share="rotary_pct")
    norm: ClassVar = {"type": "layer-norm"}
    feed_forward: ClassVar = {"type": "feed-forward", "up": BIASED, "down": BIASED}
    parallel = True
    shared_norm = False

    def fraction(self, hf: Settings) -> float:
        """Return a quarter."""
        return 0.25
