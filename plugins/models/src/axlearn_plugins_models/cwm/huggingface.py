"""Code World Model (arXiv 2510.02387) in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings
from axlearn_plugins_models.huggingface.layer_cycle import FULL, SLIDING, read_layer_types
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.windowed import WindowedDecoder


class Cwm(WindowedDecoder):
    """CWM: a Llama with windows in three of four layers."""

    experiment = "llama3-8b"
    architectures = ("CwmForCausalLM",)
    keys: ClassVar = {
        **WindowedDecoder.keys, "mlp_bias": d.MLP_BIAS, "rms_norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-5),
    }  # fmt: skip
    rope = attrs.evolve(ALL_LAYERS, theta=1_000_000.0)
    window = 8192

    def kinds(self, hf: Settings) -> list[str]:
        """Return the `layer_types`. Without them, the first of every four layers is global."""
        count = hf.need("num_hidden_layers")
        return read_layer_types(hf, lambda: [SLIDING if i % self.every else FULL for i in range(count)])

    def position(self, hf: Settings) -> Json:
        """Return the config of the position encoding. Files must state it, because transformers scales it by default."""
        hf.need("rope_parameters|rope_scaling")
        return super().position(hf)
