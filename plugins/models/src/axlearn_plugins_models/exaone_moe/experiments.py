"""K-EXAONE, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def k_exaone() -> Trainer.Config:
    """Pretrain K-EXAONE 236B-A23B without its multi-token prediction layer.

    237B parameters, of which each token uses 23B. Sizes: huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 153_600, "num_hidden_layers": 48, "hidden_size": 6144, "intermediate_size": 18_432,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128, "num_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "sliding_window": 128, "sliding_window_pattern": 4,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("exaone_moe", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
