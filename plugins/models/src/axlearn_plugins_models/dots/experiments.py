"""dots.llm1 (arXiv 2506.05767), with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def dots1() -> Trainer.Config:
    """Pretrain dots.llm1, a mixture of 128 experts and two shared experts.

    143B parameters, of which each token uses 14B. Sizes: huggingface.co/rednote-hilab/dots.llm1.base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 152_064, "num_hidden_layers": 62, "hidden_size": 4096, "intermediate_size": 10_944,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "sliding_window": None, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("dots1", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
