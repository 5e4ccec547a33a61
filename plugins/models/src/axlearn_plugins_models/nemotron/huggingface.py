"""Nemotron-4 and Minitron in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d


class Nemotron(d.RopeDecoder):
    """Nemotron: LayerNorm with scales around zero, partial rotary positions, and squared ReLUs."""

    experiment = "llama3-8b"
    architectures = ("NemotronForCausalLM",)
    feed_forward: ClassVar = {"type": "feed-forward"}
    norm: ClassVar = {"type": "layer-norm", "offset": 1.0}
    keys: ClassVar = d.with_defaults(
        {
            **d.SIZES,
            **d.HEADS,
            **d.DENSE,
            "norm_eps": d.norm_key(1e-5),
            "tie_word_embeddings": d.TIED,
            "attention_bias": d.bias_key(False, *d.QKVO),
            "mlp_bias": d.bias_key(False, *d.PLAIN),
        },
        hidden_act="relu2",
    )
    fraction = 0.5
