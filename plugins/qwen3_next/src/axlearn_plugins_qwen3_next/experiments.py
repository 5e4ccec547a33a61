"""Experiments with Qwen3-Next: the published size, and a toy."""

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


def qwen3_next_80b_a3b() -> Trainer.Config:
    """Pretrain Qwen3-Next 80B-A3B, with linear attention in three of four layers.

    79.7B parameters, of which each token uses 3.3B. Sizes: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json.
    """
    balanced = {"decoder.layer.feed_forward.router.load_balance": 0.001}
    model = ax.patch(published_model("qwen3_next", PUBLISHED), balanced)
    config = pretraining(model, sequence_length=4096, peak=3e-4, max_steps=500_000)
    # The published model has two heads of keys, which the rules for machines would shard over eight devices.
    # `axlearn plan` counts 59.7 GiB per GPU with two microbatches, and 96.8 GiB (of 79.1) without.
    rule = TargetRule(shape={"fsdp": 32, "expert": 8}, features=("gradient-accumulation:steps=2",))
    return ax.patch(config, {"mesh": Mesh(targets={"h100-8x32": rule})})


def qwen3_next_toy() -> Trainer.Config:
    """Train a small Qwen3-Next on the quickstart's data, in about three minutes on two CPU cores.

    0.776M parameters.
    """
    model = ax.patch(published_model("qwen3_next", PUBLISHED | TOY), {"dtype": "float32"})
    return ax.patch(ax.resolve("quickstart").config, {"model": model})
