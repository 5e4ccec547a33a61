"""Mistral, Mixtral and Ministral in Hugging Face format."""

from typing import Any, ClassVar

import attrs

from axlearn_core.config import patch
from axlearn_plugins_models.huggingface import windowed
from axlearn_plugins_models.huggingface.decoder import ATTENTION, FEED_FORWARD, MIXTURE, RopeDecoder, mixture_rules
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.layer_cycle import FULL, SLIDING, read_layer_types
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS, parameters, positive_number, read_rope

WINDOW = Key(f"{ATTENTION}.window", default=None)
BETA, INTERVAL = "llama_4_scaling_beta", "original_max_position_embeddings"


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


class Ministral(windowed.WindowedDecoder):
    """Ministral: a Mistral in which some layers have no window."""

    experiment = "llama3-8b"
    architectures = ("MinistralForCausalLM",)

    def kinds(self, hf: Settings) -> list[str]:
        """Return the `layer_types`. Without them, every layer has a window, if there is one."""
        kind = FULL if hf.get("sliding_window", self.window) is None else SLIDING
        return read_layer_types(hf, lambda: [kind] * hf.need("num_hidden_layers"))


class Ministral3(RopeDecoder):
    """Ministral 3: the rotated queries of later positions are larger."""

    experiment = "llama3-8b"
    architectures = ("Ministral3ForCausalLM",)
    keys: ClassVar = {
        **RopeDecoder.keys,
        "head_dim": Key(f"{ATTENTION}.head_dim", default=128),
        "rms_norm_eps": attrs.evolve(RopeDecoder.keys["rms_norm_eps"], default=1e-5),
        "sliding_window": WINDOW,
    }
    rope = attrs.evolve(ALL_LAYERS, theta=1_000_000.0)

    def position(self, hf: Settings) -> Json:
        """Return the config of the rotary encoding and of the factor for queries."""
        hf.need("rope_parameters|rope_scaling")
        rope = parameters(hf, self.rope)
        rope.pop("max_position_embeddings", None)
        scale, interval = positive_number(rope, BETA), int(positive_number(rope, INTERVAL))
        del rope[BETA]
        inner = read_rope(hf, rope=rope)
        return {"type": "query-temperature", "interval": interval, "scale": scale, "shift": 0, "inner": inner}

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters, with those of the factor for queries."""
        position = config.model.decoder.layer.attention.position
        keys = super().export_keys(patch(config, {f"{ATTENTION}.position": position.inner}))
        factor = {BETA: position.scale, INTERVAL: position.interval}
        return {**keys, "rope_parameters": keys["rope_parameters"] | factor}
