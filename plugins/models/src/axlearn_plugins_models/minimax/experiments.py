"""MiniMax-M2, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def minimax_m2() -> Trainer.Config:
    """Pretrain MiniMax-M2, a mixture of 256 experts.

    229B parameters, of which each token uses 10B. Sizes: huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 200_064, "num_hidden_layers": 62, "hidden_size": 3072, "intermediate_size": 1536,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256,
        "num_experts_per_tok": 8, "rms_norm_eps": 1e-6, "rope_theta": 5_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("minimax_m2", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
