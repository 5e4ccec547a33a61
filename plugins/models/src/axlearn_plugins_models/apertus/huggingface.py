"""Apertus in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.table import Rule

NORMS = {"attention_norm": "attention_layernorm", "feed_forward_norm": "feedforward_layernorm"}
NUMBERS = {"alpha_positive": "alpha_p", "alpha_negative": "alpha_n", "beta": "beta", "eps": "eps"}


class Apertus(d.RopeDecoder):
    """Apertus: norms of queries and keys, and feed-forward layers without a gate, whose activation xIELU has parameters."""

    experiment = "llama3-8b"
    architectures = ("ApertusForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, "tie_word_embeddings": d.TIED, "attention_bias": d.ATTENTION_BIAS,
        "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
        "rms_norm_eps": Key((*d.NORMS["rms_norm_eps"].places, f"{d.ATTENTION}.qk_norm.eps"), default=1e-5, read=float),
    }  # fmt: skip
    fixed: ClassVar = {"hidden_act": "xielu"}
    unused_keys = ("mlp_bias", "post_norm", "qk_norm")
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
        *(Rule(f"{d.OURS}.{a}.weight", f"{d.THEIRS}.{b}.weight") for a, b in NORMS.items()),
        *(Rule(f"{d.OURS}.feed_forward.activation.{a}", f"{d.THEIRS}.mlp.act_fn.{b}") for a, b in NUMBERS.items()),
    )  # fmt: skip
    rope = attrs.evolve(ALL_LAYERS, theta=12_000_000.0)
    feed_forward: ClassVar = {"type": "feed-forward", "activation": {"type": "xielu"}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding, the feed-forward layers and the norms of queries and keys."""
        hf.need("rope_parameters|rope_scaling")  # without them, transformers scales the frequencies
        return super().settings(hf) | {f"{d.ATTENTION}.qk_norm": {"type": "rms-norm"}}
