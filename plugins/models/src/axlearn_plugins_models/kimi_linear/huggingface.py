"""Kimi Linear (arXiv 2510.26692) in Hugging Face format."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from axlearn_plugins_models.deepseek.huggingface import THEIRS, DeepSeekV3
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface import recurrent_layers as r
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet

WRITTEN = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
           "n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize"}  # fmt: skip
READ = {theirs: name for name, theirs in WRITTEN.items()}
"""Key of Kimi Linear -> key of DeepSeek-V3. The methods of DeepSeek-V3 read the latter."""


class KimiLinear(DeepSeekV3):
    """Kimi Linear: Kimi delta attention or latent attention without positions, and experts as in DeepSeek-V3."""

    architectures: ClassVar = ("KimiLinearForCausalLM",)
    keys: ClassVar = {**d.SIZES, **d.NORMS, "tie_word_embeddings": d.TIED}
    fixed: ClassVar = {**DeepSeekV3.fixed, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    unused_keys: ClassVar = ("num_key_value_heads", "model_max_length", "use_grouped_topk")
    rules: ClassVar = (
        *DeepSeekV3.rules, *d.expert_rules("block_sparse_moe", ("w1", "w3", "w2")),
        *d.feed_forward_rules("feed_forward.shared", "block_sparse_moe.shared_experts"),
        Rule(f"{d.OURS}.feed_forward.router.bias", f"{d.THEIRS}.block_sparse_moe.gate.e_score_correction_bias"),
    )  # fmt: skip

    def table(self, model: Any) -> tuple[Rule, ...]:
        """Return the rules of both kinds of layers."""
        return (*super().table(model), *r.kimi_delta_rules(THEIRS))

    def dequantize(self, data: Mapping[str, Any], stored: Any) -> Any:
        """Rename the dense layers of files that transformers wrote, and read quantized weights."""
        names = {name: re.sub(r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.", name) for name in stored}
        return super().dequantize(data, {names[n]: attrs.evolve(t, name=names[n]) for n, t in stored.items()})

    def resolve(self, data: Mapping[str, Any], **more: Any) -> Any:
        """Resolve the experiment, with the keys of DeepSeek-V3. Raise `ConfigError` if a dense layer is above experts."""
        kinds = data.get("mlp_layer_types") or ["dense"] * data.get("first_k_dense_replace", 1)
        if [*kinds] != sorted(kinds):
            raise unsupported("mlp_layer_types", kinds, ["dense layers, then sparse layers"])
        hf = {"routed_scaling_factor": 2.446} | {READ.get(k, k): v for k, v in data.items() if k != "mlp_layer_types"}
        return super().resolve(hf | {"first_k_dense_replace": kinds.count("dense")}, **more)

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the experts."""
        return {"moe": super().features(hf)["moe"]}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the two kinds of layers and the size of the dense layers."""
        linear, count = hf.get("linear_attn_config") or {}, hf.need("num_hidden_layers")
        full = linear.get("full_attn_layers") or range(5, count + 1, 4)  # the first layer has the number 1
        kinds = r.read_kinds(hf, r.make_kinds(count, [i - 1 for i in full]))
        latent: Json = {"type": "latent-attention", **super().features(hf)["mla"], "query_rank": hf.get("q_lora_rank")}
        latent |= {"num_heads": hf.need("num_attention_heads"), "head_dim": hf.need("qk_nope_head_dim")}
        sizes = {k: v for k, v in super().settings(hf).items() if k.endswith("hidden_dim")}
        return sizes | {d.ATTENTION: r.alternate(kinds, {r.RECURRENT: r.read_kimi_delta(hf), r.ATTENTION: latent})}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        kinds, delta, latent = r.split_kinds(config.model.decoder, GatedDeltaNet.Config)
        keys = self.write_experts(config) | r.write_kimi_delta(delta, kinds)
        return {WRITTEN.get(k, k): v for k, v in (keys | self.write_latent(latent)).items()}

    def compatibility_keys(self, data: Json) -> Json:
        """Return nothing, because the model has no positions."""
        return {}
