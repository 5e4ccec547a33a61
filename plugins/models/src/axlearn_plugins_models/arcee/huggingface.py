"""AFM-4.5B (Arcee) in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings

UP_AND_DOWN = tuple(f"{d.FEED_FORWARD}.{part}.bias" for part in ("up", "down"))


class Arcee(d.RopeDecoder):
    """Arcee: a Llama whose feed-forward layers have no gate and square the ReLU."""

    experiment = "llama3-8b"
    architectures = ("ArceeForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys,
        "attention_bias": d.ATTENTION_BIAS,
        "mlp_bias": Key(UP_AND_DOWN, default=False),
        "hidden_act": Key(f"{d.FEED_FORWARD}.activation", default="relu2", values=d.ACTIVATIONS),
    }

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the kind of feed-forward layer."""
        return {"replace": {"path": d.FEED_FORWARD, "component": "feed-forward"}}
