"""Experiments with Qwen3-Next and Qwen3.5: published sizes, and a toy."""

from typing import Any

import axlearn_core as ax
from axlearn_core.extend import Mesh, TargetRule, Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

PUBLISHED = {
    "vocab_size": 151_936, "num_hidden_layers": 48, "hidden_size": 2048, "rms_norm_eps": 1e-6,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
TOY = {
    "vocab_size": 2048, "num_hidden_layers": 4, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
QWEN_3_5 = {
    "vocab_size": 248_320, "num_attention_heads": 16, "head_dim": 256, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
"""Sizes that the models of Qwen3.5 share."""


def qwen3_next_80b_a3b() -> Trainer.Config:
    """Pretrain Qwen3-Next 80B-A3B, with linear attention in three of four layers.

    79.7B parameters, of which each token uses 3.3B. Sizes: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json.
    """
    return _with_experts("qwen3_next", PUBLISHED)


def qwen3_5_9b() -> Trainer.Config:
    """Pretrain the text model of Qwen3.5 9B, with linear attention in three of four layers.

    8.95B parameters. Sizes: `text_config` of huggingface.co/Qwen/Qwen3.5-9B/blob/main/config.json.
    """
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 4}
    model = published_model("qwen3_5_text", QWEN_3_5 | sizes)
    return pretraining(model, sequence_length=4096, peak=3e-4, max_steps=500_000)


def qwen3_5_35b_a3b() -> Trainer.Config:
    """Pretrain the text model of Qwen3.5 35B-A3B, with linear attention in three of four layers.

    34.7B parameters, of which each token uses 3.0B. Sizes: `text_config` of
    huggingface.co/Qwen/Qwen3.5-35B-A3B/blob/main/config.json.
    """
    sizes = {"num_hidden_layers": 40, "hidden_size": 2048, "num_key_value_heads": 2, "num_experts": 256,
             "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}  # fmt: skip
    return _with_experts("qwen3_5_moe_text", QWEN_3_5 | sizes)


def _with_experts(model_type: str, sizes: dict[str, Any]) -> Trainer.Config:
    """Return an experiment with balanced experts."""
    balanced = {"decoder.layer.feed_forward.router.load_balance": 0.001}
    model = ax.patch(published_model(model_type, sizes), balanced)
    config = pretraining(model, sequence_length=4096, peak=3e-4, max_steps=500_000)
    # The published models have two heads of keys, which the rules for machines would shard over eight devices.
    # For Qwen3-Next, `axlearn plan` counts 59.7 GiB per GPU with two microbatches, and 96.8 GiB (of 79.1) without.
    rule = TargetRule(shape={"fsdp": 32, "expert": 8}, features=("gradient-accumulation:steps=2",))
    return ax.patch(config, {"mesh": Mesh(targets={"h100-8x32": rule})})


def qwen3_next_toy() -> Trainer.Config:
    """Train a small Qwen3-Next on the quickstart's data, in about three minutes on two CPU cores.

    0.776M parameters.
    """
    model = ax.patch(published_model("qwen3_next", PUBLISHED | TOY), {"dtype": "float32"})
    return ax.patch(ax.resolve("quickstart").config, {"model": model})
