"""Tables that decoders with shared experts share: dense layers at the bottom, and then DeepSeek-V3's mixture of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Family, Json, Settings, unsupported
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_transformer.alternate import Alternate

FIRST, TYPES = "first_k_dense_replace", "mlp_layer_types"
SHARED_EXPERT_RULES = (
    *d.OUTER_RULES,
    *d.NORM_RULES,
    *d.feed_forward_rules(),
    *d.expert_rules(),
    *d.feed_forward_rules("feed_forward.shared", "mlp.shared_experts"),
    Rule(f"{d.OURS}.feed_forward.router.bias", f"{d.THEIRS}.mlp.gate.e_score_correction_bias"),
)
"""Rules for everything except attention."""


def experts_of(config: Any) -> tuple[Any, list[Any]]:
    """Return the mixture of experts of a config, and the dense layers at the bottom."""
    slot = config.model.decoder.layer.feed_forward
    return (slot.children[0], [*slot.first]) if isinstance(slot, Alternate) else (slot, [])


class SharedExperts(Family):
    """Base class for families with dense layers at the bottom, shared experts, and routing by sigmoid scores with a bias.

    Attributes:
        num_experts: Key for the number of experts.
        num_shared: Key for the number of shared experts.
        defaults: Values of missing keys.
    """

    num_experts: ClassVar[str] = "n_routed_experts"
    num_shared: ClassVar[str] = "n_shared_experts"
    defaults: ClassVar[Mapping[str, Any]] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, FIRST: 0}

    def router(self, hf: Settings) -> Json:
        """Return the config of the expert router."""
        groups = {"num_groups": hf.get("n_group") or 1, "top_groups": hf.get("topk_group") or 1}
        normalize, scale = (hf.get(key, self.defaults[key]) for key in ("norm_topk_prob", "routed_scaling_factor"))
        return {"type": "sigmoid-router", "normalize": normalize, "scale": float(scale), **groups}

    def write_router(self, router: Any) -> Json:
        """Invert `router`."""
        return {
            "n_group": router.num_groups, "topk_group": router.top_groups, "routed_scaling_factor": router.scale,
            "norm_topk_prob": router.normalize,
        }  # fmt: skip

    def dense_layers(self, hf: Settings) -> int:
        """Return the number of dense layers. Raise `ConfigError` if they are not at the bottom."""
        count, dense = hf.need("num_hidden_layers"), hf.get(FIRST, self.defaults[FIRST])
        if (kinds := hf.get(TYPES)) is not None:
            dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), count)
            if kinds != (expected := ["dense"] * dense + ["sparse"] * (count - dense)):
                raise unsupported(TYPES, kinds, [str(expected)])
        if dense >= count:
            raise unsupported(FIRST if kinds is None else TYPES, dense, [f"fewer than the {count} layers"])
        return dense

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        experts = {
            "num_experts": hf.need(self.num_experts), "top_k": hf.need("num_experts_per_tok"),
            "hidden_dim": hf.need("moe_intermediate_size"), "shared_experts": hf.get(self.num_shared) or 0,
            "dense_layers": self.dense_layers(hf), "router": self.router(hf),
        }  # fmt: skip
        return {"moe": experts}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the size of the dense layers."""
        size = hf.need("intermediate_size") if self.dense_layers(hf) else hf.get("intermediate_size")
        return super().settings(hf) | ({f"{d.FEED_FORWARD}.first.*.hidden_dim": size} if self.dense_layers(hf) else {})

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        return super().export_keys(config) | self.write_experts(config)

    def write_experts(self, config: Any) -> Json:
        """Return the keys of the experts and of the dense layers."""
        experts, dense = experts_of(config)
        return {
            self.num_experts: experts.num_experts,
            self.num_shared: experts.shared.hidden_dim // experts.hidden_dim if experts.shared else 0,
            "num_experts_per_tok": experts.top_k, "moe_intermediate_size": experts.hidden_dim,
            "intermediate_size": dense[0].hidden_dim if dense else experts.hidden_dim,
            **self.write_dense(len(dense), config.model.decoder.num_layers), **self.write_router(experts.router),
        }  # fmt: skip

    def write_dense(self, dense: int, count: int) -> Json:
        """Return the keys for `dense` layers at the bottom of `count` layers."""
        return {FIRST: dense}
