"""Nemotron-4 and Minitron in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Settings


class Nemotron(d.RopeDecoder):
    """Nemotron: LayerNorm with scales around zero, partial rotary positions, and squared ReLUs without a gate."""

    experiment = "llama3-8b"
    architectures = ("NemotronForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.DENSE, "tie_word_embeddings": d.TIED,
        "norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-5),
        "hidden_act": attrs.evolve(d.DENSE["hidden_act"], default="relu2"),
        "attention_bias": d.ATTENTION_BIAS, "mlp_bias": d.PLAIN_BIAS,
    }  # fmt: skip
    norm: ClassVar = {"type": "layer-norm", "offset": 1.0}
    feed_forward: ClassVar = {"type": "feed-forward"}

    def fraction(self, hf: Settings) -> float:
        """Return a half."""
        return 0.5
