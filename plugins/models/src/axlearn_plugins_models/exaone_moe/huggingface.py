"""K-EXAONE in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_core.config import patch
from axlearn_plugins_models.dots.huggingface import Dots1
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings
from axlearn_plugins_models.huggingface.layer_cycle import (
    FULL,
    PATTERN,
    SLIDING,
    cycle_of,
    each_value,
    periodic_types,
    read_layer_types,
)
from axlearn_plugins_models.huggingface.shared_experts import FIRST, TYPES, SharedExperts
from axlearn_plugins_models.huggingface.table import Rule


class ExaoneMoe(Dots1):
    """K-EXAONE: sliding windows, global layers without a position encoding, and shared experts."""

    architectures = ("ExaoneMoeForCausalLM",)
    fixed: ClassVar = {"hidden_act": "silu"}
    unused_keys: ClassVar = (*Dots1.unused_keys, PATTERN)
    ignored: ClassVar = (*d.RopeDecoder.ignored, "mtp.*")
    rules: ClassVar = (
        *Dots1.rules,
        Rule(f"{d.OURS}.feed_forward.router.bias", f"{d.THEIRS}.mlp.e_score_correction_bias"),
    )
    num_experts, num_shared = "num_experts", "num_shared_experts"
    defaults: ClassVar = {**SharedExperts.defaults, FIRST: 1}

    def kinds(self, hf: Settings) -> list[str]:
        """Return the `layer_types`. Without them, every nth layer is global."""
        if hf.get("sliding_window", 4096):
            return read_layer_types(hf, lambda: periodic_types(hf, 4))
        return read_layer_types(hf, lambda: [FULL] * hf.need("num_hidden_layers"))

    def settings(self, hf: Settings) -> Json:
        """Return settings as for dots.llm1. If the model has windows, its global layers have no position encoding."""
        settings, path = super().settings(hf), f"{d.ATTENTION}.position"
        if hf.get("sliding_window", 4096) is None:
            return settings
        return settings | {path: cycle_of([settings[path] if kind == SLIDING else None for kind in self.kinds(hf)])}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys, with the RoPE parameters of the layers that have a position encoding."""
        decoder, path = config.model.decoder, f"{d.ATTENTION}.position"
        positions = each_value(decoder.layer.attention.position, decoder.num_layers)
        return super().export_keys(patch(config, {path: next(filter(None, positions), None)}))

    def write_dense(self, dense: int, count: int) -> Json:
        """Return the keys for `dense` layers at the bottom of `count` layers."""
        return {FIRST: dense, TYPES: ["dense"] * dense + ["sparse"] * (count - dense)}
