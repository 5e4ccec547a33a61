"""DeepSeek-V2-Lite (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437) and Kimi K2, with the sizes from their `config.json`."""

from typing import Any

from axlearn_core.config import patch
from axlearn_core.learn import ParameterRule
from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

ATTENTION = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _yarn(mscale: float) -> dict[str, Any]:
    """Return YaRN scaling (arXiv 2309.00071) from 4,096 to 163,840 positions."""
    return {
        "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": mscale,
        "mscale_all_dim": mscale, "original_max_position_embeddings": 4096,
    }  # fmt: skip


V3 = ATTENTION | {
    "vocab_size": 129_280, "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18_432,
    "num_attention_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0, "rope_scaling": _yarn(1.0),
}  # fmt: skip
"""Values that DeepSeek-V3 and V3.2 share."""


def deepseek_v2_lite() -> Trainer.Config:
    """Pretrain DeepSeek-V2-Lite, a mixture of experts with latent attention.

    15.7B parameters, of which each token uses 2.4B.

    Sizes: huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 102_400, "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10_944,
        "num_attention_heads": 16, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "norm_topk_prob": False, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "rope_scaling": _yarn(0.707),
    }  # fmt: skip
    model = published_model("deepseek_v2", ATTENTION | sizes)
    return pretraining(model, sequence_length=4096, peak=4.2e-4, max_steps=500_000)


def deepseek_v3() -> Trainer.Config:
    """Pretrain DeepSeek-V3 without its multi-token prediction layer.

    671B parameters, of which each token uses 37B.

    Sizes: huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json.
    """
    model = published_model("deepseek_v3", V3)
    return pretraining(model, sequence_length=4096, peak=2.2e-4, max_steps=240_000)


def freeze_indexers(config: Trainer.Config) -> Trainer.Config:
    """Freeze the lightning indexers. Their selection passes no gradients, and weight decay would shrink them."""
    learner: Any = config.learner
    return patch(config, {"learner.rules": (*learner.rules, ParameterRule(pattern="**.indexer.**", freeze=True))})


def deepseek_v3_2() -> Trainer.Config:
    """Train DeepSeek-V3.2-Exp without its multi-token prediction layer. The indexers are frozen, as they get no gradients.

    672B parameters, of which each token uses 37B.

    Sizes: huggingface.co/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/config.json.
    """
    model = published_model("deepseek_v32", V3 | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048})
    return freeze_indexers(pretraining(model, sequence_length=4096, peak=7.3e-6, max_steps=15_000))


def kimi_k2() -> Trainer.Config:
    """Pretrain Kimi K2 (arXiv 2507.20534).

    1.03T parameters, of which each token uses 32B.

    Sizes: huggingface.co/moonshotai/Kimi-K2-Base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 163_840, "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18_432,
        "num_attention_heads": 64, "q_lora_rank": 1536, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "rope_theta": 50_000.0, "rope_scaling": _yarn(1.0) | {"factor": 32.0, "beta_fast": 1.0},
    }  # fmt: skip
    model = published_model("kimi_k2", ATTENTION | sizes)
    return pretraining(model, sequence_length=4096, peak=2e-4, max_steps=230_000)
