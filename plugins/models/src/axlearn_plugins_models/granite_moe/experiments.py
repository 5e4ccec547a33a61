"""Granite 3.1 3B-A800M, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def granite3_1_3b_a800m() -> Trainer.Config:
    """Pretrain Granite 3.1 3B-A800M, a mixture of 40 experts.

    3.3B parameters, of which each token uses 0.8B.

    Sizes: huggingface.co/ibm-granite/granite-3.1-3b-a800m-base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 49_155, "num_hidden_layers": 32, "hidden_size": 1536, "intermediate_size": 512,
        "num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 6.0,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 10_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("granitemoe", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
