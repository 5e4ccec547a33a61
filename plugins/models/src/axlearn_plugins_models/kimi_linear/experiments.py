"""Kimi Linear, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

FULL_ATTENTION = (4, 8, 12, 16, 20, 24, 27)


def kimi_linear_48b_a3b() -> Trainer.Config:
    """Pretrain Kimi Linear 48B-A3B, with Kimi delta attention in 20 of 27 layers.

    49.1B parameters, of which each token uses 3.1B. Sizes:
    huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Base/blob/main/config.json.
    """
    linear = {
        "full_attn_layers": [*FULL_ATTENTION], "kda_layers": [i for i in range(1, 28) if i not in FULL_ATTENTION],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    }  # fmt: skip
    sizes = {
        "vocab_size": 163_840, "num_hidden_layers": 27, "hidden_size": 2304, "intermediate_size": 9216,
        "num_attention_heads": 32, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "linear_attn_config": linear, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "moe_renormalize": True,
        "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return pretraining(published_model("kimi_linear", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
