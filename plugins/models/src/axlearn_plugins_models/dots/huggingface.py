"""dots.llm1 (arXiv 2506.05767) in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings
from axlearn_plugins_models.huggingface.layer_cycle import FULL, SLIDING, read_layer_types, window_cycle, window_types
from axlearn_plugins_models.huggingface.shared_experts import FIRST, SHARED_EXPERT_RULES, SharedExperts


class Dots1(SharedExperts, d.RopeDecoder):
    """dots.llm1: the attention of Qwen 3, windows in the upper layers, and the experts of DeepSeek-V3."""

    experiment = "llama3-8b"
    architectures: ClassVar = ("Dots1ForCausalLM",)
    keys: ClassVar = {**d.SIZES, **d.HEADS, **d.NORMS, "tie_word_embeddings": d.TIED}
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    unused_keys: ClassVar = ("scoring_func", "topk_method")
    rules: ClassVar = (*SHARED_EXPERT_RULES, *d.ATTENTION_RULES)
    defaults: ClassVar = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, FIRST: 0}

    def kinds(self, hf: Settings) -> list[str]:
        """Return the `layer_types`."""
        count, first = hf.need("num_hidden_layers"), hf.get("max_window_layers", 62)
        return read_layer_types(hf, lambda: [FULL if i < first else SLIDING for i in range(count)])

    def settings(self, hf: Settings) -> Json:
        """Return settings for the dense layers, the position encoding, the per-head norm and the windows."""
        return super().settings(hf) | {
            f"{d.ATTENTION}.qk_norm": {"type": "rms-norm", "eps": float(hf.get("rms_norm_eps", 1e-6))},
            f"{d.ATTENTION}.window": window_cycle(self.kinds(hf), hf.get("sliding_window", 4096)),
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        kinds, size = window_types(decoder.layer.attention.window, decoder.num_layers)
        return super().export_keys(config) | {"layer_types": kinds, "sliding_window": size}
