"""GLM-4.5 and GLM-4.6 (arXiv 2508.06471) and GLM-4.7-Flash in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.deepseek.huggingface import DeepSeekV3, DeepSeekV32
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.depth_tensors import NEXT_LAYERS
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import cycle_of, each_value
from axlearn_plugins_models.huggingface.shared_experts import FIRST, SHARED_EXPERT_RULES, TYPES, SharedExperts
from axlearn_plugins_transformer.attention_variants.lightning_indexer import LightningIndexer

BIASED = tuple(f"{d.ATTENTION}.{part}" for part in ("query", "key", "value"))


class Glm4Moe(SharedExperts, d.RopeDecoder):
    """GLM-4.5: grouped queries that rotate in part, optional biases and norms of queries and keys, and shared experts."""

    experiment = "llama3-8b"
    architectures = ("Glm4MoeForCausalLM",)
    keys: ClassVar = {**d.SIZES, **d.HEADS, **d.NORMS, "tie_word_embeddings": d.TIED}
    fixed: ClassVar = {"hidden_act": "silu"}
    rules: ClassVar = (*SHARED_EXPERT_RULES, *d.ATTENTION_RULES)
    depths: ClassVar = NEXT_LAYERS
    defaults: ClassVar = {**SharedExperts.defaults, "routed_scaling_factor": 1.0, FIRST: 1}

    def fraction(self, hf: Settings) -> float:
        """Return a half."""
        return 0.5

    def settings(self, hf: Settings) -> Json:
        """Return settings for the dense layers, the position encoding, the biases and the norms of queries and keys."""
        norm = {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-5))}
        return super().settings(hf) | {
            f"{d.ATTENTION}.qk_norm": norm if hf.get("use_qk_norm", False) else None,
            **{f"{path}.bias": hf.get("attention_bias", False) for path in BIASED},
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        attention = config.model.decoder.layer.attention
        return super().export_keys(config) | {
            "use_qk_norm": attention.qk_norm is not None,
            "attention_bias": attention.query.bias,
        }


class Glm4MoeLite(DeepSeekV3):
    """GLM-4.7-Flash: GLM-4.5 with the latent attention of DeepSeek-V3."""

    architectures = ("Glm4MoeLiteForCausalLM",)
    defaults: ClassVar = {**SharedExperts.defaults, "routed_scaling_factor": 1.8, FIRST: 1}

    def write_dense(self, dense: int, count: int) -> Json:
        """Return the keys for `dense` layers at the bottom of `count` layers; transformers reads only the list of types."""
        return {FIRST: dense, TYPES: ["dense"] * dense + ["sparse"] * (count - dense)}


KINDS = ("full", "shared")


class GlmMoeDsa(DeepSeekV32):
    """GLM-5: DeepSeek-V3.2, with indexers that rotate adjacent elements, and layers that share a selection."""

    architectures = ("GlmMoeDsaForCausalLM",)
    unused_keys: ClassVar = (
        *DeepSeekV32.unused_keys,
        "index_topk_freq",
        "index_skip_topk_offset",
        "index_topk_pattern",
    )
    adjacent = True

    def indexers(self, hf: Settings, indexer: Json) -> Any:
        """Return the indexer of each layer."""
        pattern, count = hf.get("index_topk_pattern"), hf.need("num_hidden_layers")
        every, offset = max(hf.get("index_topk_freq") or 1, 1), hf.get("index_skip_topk_offset", 2)
        kinds = [KINDS[max(i - offset + 1, 0) % every > 0] for i in range(count)]
        if pattern is not None:
            kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
        kinds = hf.get("indexer_types") or kinds
        if len(kinds) != count or {*kinds} - {*KINDS} or kinds[0] == "shared":
            raise unsupported("indexer_types", kinds, [f"full or shared for each of {count} layers, first full"])
        return cycle_of([indexer if kind == "full" else {"type": "shared-selection"} for kind in kinds])

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        indexers = each_value(decoder.layer.attention.indexer, decoder.num_layers)
        return super().export_keys(config) | {
            "indexer_types": [KINDS[not isinstance(x, LightningIndexer.Config)] for x in indexers]
        }
