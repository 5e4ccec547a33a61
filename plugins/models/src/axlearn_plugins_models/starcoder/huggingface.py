"""StarCoder 2 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.table import Rule

NORMS = {"decoder.norm": "model.norm", f"{d.OURS}.attention_norm": f"{d.THEIRS}.input_layernorm",
         f"{d.OURS}.feed_forward_norm": f"{d.THEIRS}.post_attention_layernorm"}  # fmt: skip
PARTS = (("up", "c_fc"), ("down", "c_proj"))


class StarCoder2(d.RopeDecoder):
    """StarCoder 2: LayerNorm, biases everywhere, and feed-forward layers without a gate."""

    experiment = "llama3-8b"
    architectures = ("Starcoder2ForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.DENSE,
        "use_bias": Key((*d.ATTENTION_BIAS.places, *(f"{d.FEED_FORWARD}.{ours}.bias" for ours, _ in PARTS)), default=True),
        "hidden_act": Key(f"{d.FEED_FORWARD}.activation", default="gelu_pytorch_tanh", values=d.ACTIVATIONS),
        "norm_epsilon": Key((f"{d.LAYER}.norm.eps", "model.decoder.norm.eps"), default=1e-5, read=float),
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
        "sliding_window": Key(f"{d.ATTENTION}.window", default=None),
    }  # fmt: skip
    unused_keys = ("embedding_dropout", "residual_dropout", "norm_type", "mlp_type")
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES,
        *(Rule(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in NORMS.items() for kind in ("weight", "bias")),
        *(Rule(f"{d.OURS}.feed_forward.{a}.weight", f"{d.THEIRS}.mlp.{b}.weight", "o i -> i o") for a, b in PARTS),
        *(Rule(f"{d.OURS}.feed_forward.{a}.bias", f"{d.THEIRS}.mlp.{b}.bias") for a, b in PARTS),
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the kind of feed-forward layer."""
        return {"replace": {"path": d.FEED_FORWARD, "component": "feed-forward"}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms and the position encoding."""
        norm = {"type": "layer-norm"}
        return super().settings(hf) | {f"{d.LAYER}.norm": norm, "model.decoder.norm": norm}
