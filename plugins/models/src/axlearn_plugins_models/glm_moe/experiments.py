"""GLM-4.5-Air, GLM-4.6 (arXiv 2508.06471) and GLM-4.7-Flash, with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.deepseek.experiments import freeze_indexers
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

GLM = {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "n_shared_experts": 1,
       "num_experts_per_tok": 8, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
       "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0, "vocab_size": 151_552}  # fmt: skip
"""Values that GLM-4.5-Air and GLM-4.6 share."""


def glm4_5_air() -> Trainer.Config:
    """Pretrain GLM-4.5-Air without its multi-token prediction layer.

    107B parameters, of which each token uses 12B. Sizes: huggingface.co/zai-org/GLM-4.5-Air/blob/main/config.json.
    """
    sizes = {
        "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
    }  # fmt: skip
    return pretraining(published_model("glm4_moe", GLM | sizes), sequence_length=4096, peak=2.5e-4, max_steps=500_000)


def glm4_6() -> Trainer.Config:
    """Pretrain GLM-4.6 without its multi-token prediction layer.

    353B parameters, of which each token uses 32B. Sizes: huggingface.co/zai-org/GLM-4.6/blob/main/config.json.
    """
    sizes = {
        "num_hidden_layers": 92, "hidden_size": 5120, "intermediate_size": 12_288, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    }  # fmt: skip
    return pretraining(published_model("glm4_moe", GLM | sizes), sequence_length=4096, peak=2.5e-4, max_steps=500_000)


def glm4_7_flash() -> Trainer.Config:
    """Pretrain GLM-4.7-Flash without its multi-token prediction layer.

    29.9B parameters, of which each token uses 3B. Sizes: huggingface.co/zai-org/GLM-4.7-Flash/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 154_880, "num_hidden_layers": 47, "hidden_size": 2048, "intermediate_size": 10_240,
        "moe_intermediate_size": 1536, "num_attention_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    model = published_model("glm4_moe_lite", sizes)
    return pretraining(model, sequence_length=4096, peak=2.5e-4, max_steps=500_000)


def glm5() -> Trainer.Config:
    """Pretrain GLM-5 without its multi-token prediction layer. The indexers are frozen, as they get no gradients.

    744B parameters, of which each token uses 40B. Sizes: huggingface.co/zai-org/GLM-5/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 154_880, "num_hidden_layers": 78, "hidden_size": 6144, "intermediate_size": 12_288,
        "moe_intermediate_size": 2048, "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }  # fmt: skip
    model = published_model("glm_moe_dsa", sizes)
    return freeze_indexers(pretraining(model, sequence_length=4096, peak=2e-4, max_steps=500_000))
