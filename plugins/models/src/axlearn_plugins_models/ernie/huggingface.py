"""Dense ERNIE 4.5 models in Hugging Face format."""

from typing import ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Key
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS


class Ernie45(d.RopeDecoder):
    """ERNIE 4.5: a Llama in which adjacent elements of a head rotate."""

    experiment = "llama3-8b"
    architectures = ("Ernie4_5ForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys,
        "use_bias": Key((*d.ATTENTION_BIAS.places, *d.MLP_BIAS.places), default=False),
        "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
    }
    rope = attrs.evolve(ALL_LAYERS, theta=500_000.0)
    interleaved = True
