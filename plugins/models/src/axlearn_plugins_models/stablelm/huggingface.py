"""StableLM in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface import decoder as d


class StableLm(d.RopeDecoder):
    """StableLM: LayerNorm, partial rotary positions, and optionally parallel halves."""

    experiment = "llama3-8b"
    architectures = ("StableLmForCausalLM",)
    norm: ClassVar = {"type": "layer-norm"}
    parallel = False
    keys: ClassVar = {
        **d.SIZES,
        **d.HEADS,
        **d.DENSE,
        "layer_norm_eps": d.norm_key(1e-5),
        "tie_word_embeddings": d.TIED,
        "use_qkv_bias": d.bias_key(False, *d.QKV),
    }
    fixed: ClassVar = {"qk_layernorm": False}
    unused_keys = ("hidden_dropout",)
    fraction = 0.25
