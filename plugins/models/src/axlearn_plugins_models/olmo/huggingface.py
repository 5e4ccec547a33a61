"""OLMo 2 and 3 in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.layer_cycle import FULL, SLIDING, cycle_of, each_value, window_types
from axlearn_plugins_models.huggingface.rope import Kind, missing_forms, parameters, read_rope, write_rope
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_models.huggingface.windowed import WindowedDecoder

EPS = Key(
    (f"{d.LAYER}.post_norm.eps", "model.decoder.norm.eps", f"{d.ATTENTION}.qk_norm.eps"), default=1e-5, read=float
)


class Olmo2(d.RopeDecoder):
    """OLMo 2: norms after each half of a layer instead of before it, and over all heads of queries and keys."""

    experiment = "llama3-8b"
    architectures = ("Olmo2ForCausalLM",)
    keys: ClassVar = {**d.SIZES, **d.HEADS, **d.DENSE, "tie_word_embeddings": d.TIED, "rms_norm_eps": EPS}
    fixed: ClassVar = {"attention_bias": False}
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
        Rule(f"{d.OURS}.attention_post_norm.weight", f"{d.THEIRS}.post_attention_layernorm.weight"),
        Rule(f"{d.OURS}.feed_forward_post_norm.weight", f"{d.THEIRS}.post_feedforward_layernorm.weight"),
    )  # fmt: skip
    qk_norm_over: ClassVar[str] = "all_heads"

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the norms."""
        norm = {"type": "rms-norm"}
        norms = {f"{d.LAYER}.norm": None, f"{d.LAYER}.post_norm": norm, f"{d.ATTENTION}.qk_norm": norm}
        return super().settings(hf) | {**norms, f"{d.ATTENTION}.qk_norm_over": self.qk_norm_over}


KINDS = (Kind(SLIDING, "rope_theta", 500_000.0, scaled=False), Kind(FULL, "rope_theta", 500_000.0, scaled=True))
"""Only layers with global attention scale their frequencies."""


class Olmo3(Olmo2, WindowedDecoder):
    """OLMo 3: OLMo 2 with windows in three of four layers."""

    architectures = ("Olmo3ForCausalLM",)

    def position(self, hf: Settings) -> Json:
        """Return the position encodings of both kinds of layers."""
        encodings = {kind.name: read_rope(hf, rope=parameters(hf, kind, KINDS)) for kind in KINDS}
        return cycle_of([encodings[kind] for kind in self.kinds(hf)])

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder = config.model.decoder
        attention, count = decoder.layer.attention, decoder.num_layers
        kinds, size = window_types(attention.window, count)
        positions = dict(zip(kinds, each_value(attention.position, count), strict=True))
        positions = {kind.name: positions.get(kind.name) or positions[kinds[0]] for kind in KINDS}
        ropes = {name: write_rope(position) for name, position in positions.items()}
        return {"layer_types": kinds, "sliding_window": size, "rope_parameters": ropes}

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data, KINDS)
