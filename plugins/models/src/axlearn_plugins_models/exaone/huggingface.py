"""EXAONE 4 in Hugging Face format."""

from typing import ClassVar

from axlearn_plugins_models.huggingface.family import Settings
from axlearn_plugins_models.huggingface.layer_cycle import PATTERN
from axlearn_plugins_models.huggingface.windowed import WindowedDecoder
from axlearn_plugins_models.olmo.huggingface import Olmo2


class Exaone4(Olmo2, WindowedDecoder):
    """EXAONE 4: norms after each half of a layer and over each head; without windows, all layers have positions."""

    architectures = ("Exaone4ForCausalLM",)
    fixed: ClassVar = {}
    unused_keys = (PATTERN,)
    qk_norm_over = "head"
    global_positions = False

    def kinds(self, hf: Settings) -> list[str]:
        """Return the `layer_types`; a pattern such as LLLG counts its letters."""
        pattern = hf.get(PATTERN)
        return super().kinds(Settings({**hf, PATTERN: len(pattern)}) if isinstance(pattern, str) else hf)
