"""Command R and Command A (Cohere) in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_models.huggingface.windowed import WindowedDecoder


class Cohere(d.RopeDecoder):
    """Command R: attention and the feed-forward layer in parallel, LayerNorm without biases, and scaled logits."""

    experiment = "llama3-8b"
    architectures = ("CohereForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.DENSE,
        "attention_bias": d.ATTENTION_BIAS,
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
        "logit_scale": Key("model.decoder.output_multiplier", default=0.0625, read=float),
        "layer_norm_eps": Key((f"{d.LAYER}.norm.eps", "model.decoder.norm.eps"), default=1e-5, read=float),
    }  # fmt: skip
    fixed: ClassVar = {"use_qk_norm": False}
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
        Rule(f"{d.OURS}.attention_norm.weight", f"{d.THEIRS}.input_layernorm.weight"),
    )  # fmt: skip
    rope = attrs.evolve(ALL_LAYERS, theta=500_000.0)
    interleaved = True

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the kind of layer."""
        return {"replace": {"path": d.LAYER, "component": "parallel-transformer-layer"}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms and the position encoding."""
        norm = {"type": "layer-norm", "bias": False}
        return super().settings(hf) | dict.fromkeys((f"{d.LAYER}.norm", "model.decoder.norm"), norm)


class Cohere2(Cohere, WindowedDecoder):
    """Command R7B and Command A: windows in three of four layers, and no position encoding in the others."""

    architectures = ("Cohere2ForCausalLM",)
    fixed: ClassVar = {}
    rope = ALL_LAYERS
    global_positions = False
