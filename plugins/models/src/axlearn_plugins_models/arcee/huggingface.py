"""Arcee's AFM in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d


class Arcee(d.RopeDecoder):
    """AFM: a Llama with plain feed-forward layers and squared ReLUs."""

    experiment = "llama3-8b"
    architectures = ("ArceeForCausalLM",)
    keys: ClassVar = d.with_defaults(
        {
            **d.RopeDecoder.keys,
            "attention_bias": d.bias_key(False, *d.QKVO),
            "mlp_bias": d.bias_key(False, *d.PLAIN),
        },
        hidden_act="relu2", rms_norm_eps=1e-5,
    )  # fmt: skip
    feed_forward: ClassVar = {"type": "feed-forward"}
