"""Granite 3.3, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def granite3_3_2b() -> Trainer.Config:
    """Pretrain Granite 3.3 2B.

    2.53B parameters. Sizes: huggingface.co/ibm-granite/granite-3.3-2b-base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 49_159, "num_hidden_layers": 40, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 8.0,
    }  # fmt: skip
    return pretraining(published_model("granite", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def granite3_3_8b() -> Trainer.Config:
    """Pretrain Granite 3.3 8B.

    8.17B parameters. Sizes: huggingface.co/ibm-granite/granite-3.3-8b-base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 49_159, "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 12_800,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125, "logits_scaling": 16.0,
    }  # fmt: skip
    return pretraining(published_model("granite", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
