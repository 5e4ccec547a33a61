"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano, with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

SIZES = {
    "vocab_size": 131_072, "head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
"""Sizes that all these models share."""


def nemotron_h_8b() -> Trainer.Config:
    """Pretrain Nemotron-H 8B, with Mamba-2 in 24 layers, attention in 4, and feed-forward layers in 24.

    8.1B parameters. Sizes: huggingface.co/nvidia/Nemotron-H-8B-Base-8K/blob/main/config.json.
    """
    sizes = {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
        "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 8,
        "mamba_num_heads": 128, "mamba_head_dim": 64,
    }  # fmt: skip
    return pretraining(published_model("nemotron_h", SIZES | sizes), sequence_length=8192, peak=8e-4, max_steps=500_000)


def nemotron_nano_9b_v2() -> Trainer.Config:
    """Pretrain a model of Nemotron Nano 9B v2's size from scratch. The published model was pruned from a larger one.

    8.89B parameters. Sizes: huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2/blob/main/config.json.
    """
    sizes = {
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "num_hidden_layers": 56,
        "hidden_size": 4480, "intermediate_size": 15_680, "num_attention_heads": 40, "num_key_value_heads": 8,
        "mamba_num_heads": 128, "mamba_head_dim": 80,
    }  # fmt: skip
    return pretraining(
        published_model("nemotron_h", SIZES | sizes), sequence_length=8192, peak=4.5e-4, max_steps=500_000
    )


def nemotron3_nano_30b_a3b() -> Trainer.Config:
    """Pretrain Nemotron 3 Nano, with Mamba-2 in 23 layers, attention in 6, and 128 experts and a shared one in 23.

    31.6B parameters, of which each token uses 3.6B.

    Sizes: huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/blob/main/config.json.
    """
    sizes = {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
        "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }  # fmt: skip
    return pretraining(published_model("nemotron_h", SIZES | sizes), sequence_length=8192, peak=1e-3, max_steps=500_000)
