"""Mistral and Mixtral in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface.decoder import ATTENTION, FEED_FORWARD, MIXTURE, RopeDecoder, mixture_rules
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS

WINDOW = Key(f"{ATTENTION}.window", default=None)


class Mistral(RopeDecoder):
    """Mistral: a Llama with a sliding window in its first version."""

    experiment = "llama3-8b"
    architectures = ("MistralForCausalLM",)
    keys: ClassVar = {**RopeDecoder.keys, "sliding_window": WINDOW}


class Mixtral(RopeDecoder):
    """Mixtral: experts in every layer; the router weights of a token sum to 1."""

    experiment = "llama3-8b"
    architectures = ("MixtralForCausalLM",)
    common = True
    keys: ClassVar = {
        **MIXTURE,
        "sliding_window": WINDOW,
        "num_local_experts": f"{FEED_FORWARD}.num_experts",
        "intermediate_size": f"{FEED_FORWARD}.hidden_dim",
    }
    fixed: ClassVar = {"hidden_act": "silu"}
    rope = attrs.evolve(ALL_LAYERS, theta=1_000_000.0)
    rules = mixture_rules("block_sparse_moe", ("w1", "w3", "w2"))

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        return {"moe": {"router": {"type": "softmax-router", "normalize": True}}}
