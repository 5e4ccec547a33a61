"""Granite 3 mixture-of-experts models in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings
from axlearn_plugins_models.huggingface.table import Rule

OURS, MOE = f"{d.OURS}.feed_forward", f"{d.THEIRS}.block_sparse_moe"
SHARED = f"{d.THEIRS}.shared_mlp"

MULTIPLIERS = {
    "embedding_multiplier": Key("model.decoder.embedding.multiplier", default=1.0, read=float),
    "residual_multiplier": Key(f"{d.LAYER}.residual_multiplier", default=1.0, read=float),
    "attention_multiplier": Key(f"{d.ATTENTION}.scale", default=1.0, read=float),
    "logits_scaling": Key("model.decoder.output_multiplier", default=1.0, read=lambda n: 1 / n, write=lambda n: 1 / n),
}
"""Keys of the factors of all Granite models."""


class GraniteMoe(d.RopeDecoder):
    """Granite 3: experts in every layer, and factors for embeddings, scores, residual sums and logits."""

    experiment = "llama3-8b"
    architectures = ("GraniteMoeForCausalLM",)
    keys: ClassVar = {
        **d.MIXTURE, "num_local_experts": f"{d.FEED_FORWARD}.num_experts", "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
        **MULTIPLIERS,
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    rules: ClassVar = (
        *d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES,
        Rule(f"{OURS}.router.weight", f"{MOE}.router.layer.weight", "e d -> d e"),
        Rule((f"{OURS}.gate.weight", f"{OURS}.up.weight"), f"{MOE}.input_linear.weight", "e f* d -> e d f"),
        Rule(f"{OURS}.down.weight", f"{MOE}.output_linear.weight", "e d f -> e f d"),
        Rule((f"{OURS}.shared.gate.weight", f"{OURS}.shared.up.weight"), f"{SHARED}.input_linear.weight", "f* d -> d f"),
        Rule(f"{OURS}.shared.down.weight", f"{SHARED}.output_linear.weight", "d f -> f d"),
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        return {"moe": {"router": {"type": "softmax-router", "normalize": True}}}


class GraniteMoeShared(GraniteMoe):
    """Granite 3 with a shared expert."""

    architectures = ("GraniteMoeSharedForCausalLM",)

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the shared expert."""
        size = hf.get("shared_intermediate_size", 0)
        shared = {"type": "gated-feed-forward", "hidden_dim": size} if size else None
        return super().settings(hf) | {f"{d.FEED_FORWARD}.shared": shared}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        shared = config.model.decoder.layer.feed_forward.shared
        return super().export_keys(config) | {"shared_intermediate_size": shared.hidden_dim if shared else 0}
