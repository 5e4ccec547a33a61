"""ERNIE 4.5 mixture-of-experts models in Hugging Face format."""

from typing import Any, ClassVar

import attrs

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS
from axlearn_plugins_models.huggingface.shared_experts import SHARED_EXPERT_RULES
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_transformer.alternate import Alternate

START, END, EVERY = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


class Ernie45Moe(d.RopeDecoder):
    """ERNIE 4.5: adjacent pairs rotate, and a softmax router with a bias that affects only the selection."""

    experiment = "llama3-8b"
    architectures = ("Ernie4_5_MoeForCausalLM",)
    keys: ClassVar = {
        **d.SIZES, **d.HEADS, **d.NORMS, "tie_word_embeddings": Key("model.decoder.head", default=True, values=d.TIED.values)
    }  # fmt: skip
    fixed: ClassVar = {"use_bias": False, "hidden_act": "silu", "moe_norm_min": 1e-12}
    unused_keys: ClassVar = ("moe_capacity", "moe_gate", "moe_use_aux_free")
    ignored: ClassVar = (*d.RopeDecoder.ignored, "*mtp*")
    rope, interleaved = attrs.evolve(ALL_LAYERS, theta=500_000.0), True
    rules: ClassVar = (
        *SHARED_EXPERT_RULES, *d.ATTENTION_RULES,
        Rule(f"{d.OURS}.feed_forward.router.bias", f"{d.THEIRS}.mlp.moe_statics.e_score_correction_bias", "1 e -> e"),
    )  # fmt: skip

    def places(self, hf: Settings) -> tuple[int, int]:
        """Return (number of dense layers at the bottom, n), if every nth layer above has experts."""
        count, start, every = hf.need("num_hidden_layers"), hf.get(START, 1), hf.get(EVERY, 1)
        last, end = max(i for i in range(count) if not (i + 1) % every), hf.get(END, -1)
        if (count - 1 if end == -1 else end) < last:
            raise unsupported(END, end, ["-1", f"at least {last}"])
        return start - start % every, every

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        dense, every = self.places(hf)
        return {"moe": {
            "num_experts": hf.need("moe_num_experts"), "top_k": hf.need("moe_k"), "dense_layers": dense, "every": every,
            "hidden_dim": hf.need("moe_intermediate_size"), "shared_experts": hf.get("moe_num_shared_experts", 2) or 0,
            "router": {"type": "sigmoid-router", "score": {"type": "softmax-score"}},
        }}  # fmt: skip

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encoding and the size of the dense layers."""
        dense, every = self.places(hf)
        paths = [f"{d.FEED_FORWARD}.first.*"] * bool(dense)
        paths += [f"{d.FEED_FORWARD}.children.{i}" for i in range(every - 1)]
        return super().settings(hf) | {f"{path}.hidden_dim": hf.need("intermediate_size") for path in paths}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        slot = config.model.decoder.layer.feed_forward
        kinds: tuple[Any, ...] = (*slot.first, *slot.children) if isinstance(slot, Alternate) else (slot,)
        experts = kinds[-1]
        return super().export_keys(config) | {
            "moe_num_experts": experts.num_experts, "moe_k": experts.top_k, "moe_intermediate_size": experts.hidden_dim,
            "moe_num_shared_experts": experts.shared.hidden_dim // experts.hidden_dim if experts.shared else 0,
            "intermediate_size": kinds[0].hidden_dim, END: -1,
            START: len(slot.first) if isinstance(slot, Alternate) else 0,
            EVERY: len(slot.children) if isinstance(slot, Alternate) else 1,
        }  # fmt: skip
