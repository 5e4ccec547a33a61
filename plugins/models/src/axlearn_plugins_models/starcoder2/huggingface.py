"""StarCoder 2 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key


class StarCoder2(d.RopeDecoder):
    """StarCoder 2: LayerNorm, biases everywhere, plain feed-forward layers, and a sliding window."""

    experiment = "llama3-8b"
    architectures = ("Starcoder2ForCausalLM",)
    norm: ClassVar = {"type": "layer-norm"}
    feed_forward: ClassVar = {"type": "feed-forward"}
    keys: ClassVar = d.with_defaults(
        {
            **d.SIZES,
            **d.HEADS,
            **d.DENSE,
            "norm_epsilon": d.norm_key(1e-5),
            "tie_word_embeddings": d.TIED,
            "use_bias": d.bias_key(True, *d.QKVO, *d.PLAIN),
            "sliding_window": Key(f"{d.ATTENTION}.window", default=None),
        },
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, num_key_value_heads=2,
    )  # fmt: skip
    unused_keys = ("residual_dropout", "embedding_dropout")
    rules = (*d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(names=("", "c_fc", "c_proj")))
