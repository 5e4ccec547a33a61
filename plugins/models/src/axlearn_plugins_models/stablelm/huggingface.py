"""StableLM in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Settings


class StableLm(d.RopeDecoder):
    """StableLM: LayerNorm, partial rotary positions, and optionally parallel halves."""

    experiment = "llama3-8b"
    architectures = ("StableLmForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.DENSE, "tie_word_embeddings": d.TIED, "use_qkv_bias": d.QKV_BIAS,
        "layer_norm_eps": attrs.evolve(d.NORMS["rms_norm_eps"], default=1e-5),
    }  # fmt: skip
    fixed: ClassVar = {"qk_layernorm": False}
    unused_keys = ("hidden_dropout",)
    norm: ClassVar = {"type": "layer-norm"}
    parallel = False

    def fraction(self, hf: Settings) -> float:
        """Return a quarter."""
        return 0.25
