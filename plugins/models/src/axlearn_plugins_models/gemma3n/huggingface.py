"""The text models of Gemma 3n in Hugging Face format."""

from collections.abc import Sequence
from typing import Any, ClassVar

from axlearn_plugins_models.gemma.huggingface import NORMS
from axlearn_plugins_models.gemma4.huggingface import ACTIVATION, PER_LAYER, PER_LAYER_RULES, Gemma4
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import (
    FULL,
    SLIDING,
    each_value,
    led_cycle_of,
    periodic_types,
    read_layer_types,
)
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_models.huggingface.windowed import attention_keys

SPARSITY, TABLE = "activation_sparsity_pattern", "vocab_size_per_layer_input"
ALTUP, LAUREL = f"{d.LAYER}.altup", f"{d.LAYER}.laurel"
SAME_AXES = {
    "per_layer_gate.norm.weight": "post_per_layer_input_norm.weight", "laurel.norm.weight": "laurel.post_laurel_norm.weight",
    "altup.norm.weight": "altup.router_norm.weight", "gate_scale": "altup.correct_output_scale",
}  # fmt: skip
"""Tensors of a layer with the same axes in files: ours -> Hugging Face's."""


class Gemma3n(Gemma4):
    """Gemma 3n: alternating updates of four streams, learned augmented residuals, and sparse feed-forward layers."""

    architectures: ClassVar = ("Gemma3nForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values),
        "final_logit_softcapping": Key("model.logit_softcap", default=30.0, read=float),
        "altup_num_inputs": Key(f"{ALTUP}.num_streams", default=4), "laurel_rank": Key(f"{LAUREL}.rank", default=64),
        "altup_coef_clip": Key(f"{ALTUP}.coefficient_clip", default=120.0, read=float),
        "altup_correct_scale": Key(f"{d.LAYER}.gate_scale", default=True),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "altup_active_idx": 0}
    unused_keys = ()
    rules: ClassVar = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(), *PER_LAYER_RULES,
        *(Rule(f"{d.OURS}.{a}.weight", f"{d.THEIRS}.{b}.weight") for a, b in NORMS.items()),
        *(Rule(f"{d.OURS}.{a}", f"{d.THEIRS}.{b}") for a, b in SAME_AXES.items()),
        Rule(f"{d.OURS}.altup.router.weight", f"{d.THEIRS}.altup.modality_router.weight", "n d -> d n"),
        Rule(f"{d.OURS}.altup.prediction", f"{d.THEIRS}.altup.prediction_coefs.weight", "(j i) m -> m j i"),
        Rule(f"{d.OURS}.altup.correction", f"{d.THEIRS}.altup.correction_coefs.weight", "j m -> m j"),
        Rule(f"{d.OURS}.laurel.left.weight", f"{d.THEIRS}.laurel.linear_left.weight", "r d -> d r"),
        Rule(f"{d.OURS}.laurel.right.weight", f"{d.THEIRS}.laurel.linear_right.weight", "d r -> r d"),
        *(Rule(f"decoder.expand.{n}.weight", f"model.altup_projections.{n}.weight", "e d -> d e") for n in range(7)),
        *(Rule(f"decoder.merge.{n}.weight", f"model.altup_unembed_projections.{n}.weight", "e d -> d e") for n in range(7)),
    )  # fmt: skip

    def kinds(self, hf: Settings) -> list[str]:
        """Return the kind of each layer."""
        return read_layer_types(hf, lambda: periodic_types(hf, 5))

    def sizes(self, hf: Settings, kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the number of key-value heads and the size of a head, which are equal in all layers."""
        return dict.fromkeys((SLIDING, FULL), (hf.get("num_key_value_heads", 2), hf.get("head_dim", 256)))

    def settings(self, hf: Settings) -> Json:
        """Return settings for the layers and the per-layer embeddings."""
        kinds, norm = self.kinds(hf), {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6))}
        count, activation, dim = len(kinds), ACTIVATION.ours("hidden_activation", hf), hf.get(PER_LAYER, 256)
        sparse = 10 if count > 10 else 0
        pattern, sizes = hf.get(SPARSITY), hf.get("intermediate_size", 16_384)
        shares = [0.95] * sparse + [0.0] * (count - sparse) if pattern is None else pattern
        sizes = sizes if isinstance(sizes, list) else [sizes] * count
        for key, values in ((SPARSITY, shares), ("intermediate_size", sizes)):
            if not isinstance(values, list) or len(values) != count:
                raise unsupported(key, values, [f"a list of {count} numbers, one for each layer"])
        feed_forward = [
            {"type": "gated-feed-forward", "activation": activation, "hidden_dim": size,
             "form": {"type": "sparse-form", "sparsity": share} if share else None}
            for size, share in zip(sizes, shares, strict=True)
        ]  # fmt: skip
        rows = hf.get(TABLE, 262_144)
        return {
            "model.decoder": {"type": "altup-decoder"}, "model.decoder.norm": norm, "model.decoder.embedding.scale": True,
            d.LAYER: {
                "type": "altup-layer", "norm": norm, "post_norm": norm,
                "laurel": {"type": "laurel", "norm": norm},
                "per_layer_gate": {"type": "per-layer-gate", "dim": dim, "activation": activation, "norm": norm},
            },
            f"{ALTUP}.norm": norm, d.ATTENTION: led_cycle_of(self.attention(hf, kinds, norm)),
            d.FEED_FORWARD: led_cycle_of(feed_forward),
            "model.decoder.per_layer": {"type": "per-layer-embedding", "dim": dim, "norm": norm,
                                        "num_tokens": None if rows == hf.need("vocab_size") else rows},
        }  # fmt: skip

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder, layer = config.model.decoder, config.model.decoder.layer
        attention, widths = (each_value(slot, decoder.num_layers) for slot in (layer.attention, layer.feed_forward))
        return {
            **attention_keys(attention), "rms_norm_eps": decoder.norm.eps,
            "intermediate_size": [one.hidden_dim for one in widths],
            SPARSITY: [0.0 if one.form is None else one.form.sparsity for one in widths],
            "hidden_activation": d.ACTIVATION_NAMES[widths[0].activation],
            PER_LAYER: decoder.per_layer.dim, TABLE: decoder.per_layer.num_tokens or config.model.vocab_size,
        }  # fmt: skip
