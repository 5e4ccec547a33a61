"""SmolLM 3 in Hugging Face format."""

from typing import Any, ClassVar

import attrs

from axlearn_core.config import patch
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import cycle_of, each_value
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS

INTERVAL, LAYERS = "no_rope_layer_interval", "no_rope_layers"
POSITION = f"{d.ATTENTION}.position"


class SmolLM3(d.RopeDecoder):
    """SmolLM 3: a Llama without a position encoding in every fourth layer."""

    experiment = "llama3-8b"
    architectures = ("SmolLM3ForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys,
        "attention_bias": d.ATTENTION_BIAS,
        "mlp_bias": d.MLP_BIAS,
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
    }
    fixed: ClassVar = {"use_sliding_window": False}
    unused_keys = ("sliding_window", "layer_types", INTERVAL)
    rope = attrs.evolve(ALL_LAYERS, theta=2_000_000.0)

    def position(self, hf: Settings) -> Json:
        """Return an encoding for the layers with a 1 in `no_rope_layers`."""
        count, every, rope = hf.need("num_hidden_layers"), hf.get(INTERVAL, 4), super().position(hf)
        encoded = hf.get(LAYERS) or [int((i + 1) % every != 0) for i in range(count)]
        if len(encoded) < count:
            raise unsupported(LAYERS, encoded, [f"{count} values, one for each layer"])
        return cycle_of([rope if value else None for value in encoded[:count]])

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder = config.model.decoder
        positions = each_value(decoder.layer.attention.position, decoder.num_layers)
        single = patch(config, {POSITION: next(filter(None, positions), None)})
        return super().export_keys(single) | {LAYERS: [int(p is not None) for p in positions]}
