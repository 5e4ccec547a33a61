"""EXAONE 4.0 (arXiv 2507.11407), with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def exaone4_1_2b() -> Trainer.Config:
    """Pretrain EXAONE 4.0 1.2B, before its context is extended.

    1.28B parameters. Sizes: huggingface.co/LGAI-EXAONE/EXAONE-4.0-1.2B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 102_400, "num_hidden_layers": 30, "hidden_size": 2048, "intermediate_size": 4096, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0, "sliding_window": None,
    }  # fmt: skip
    return pretraining(published_model("exaone4", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def exaone4_32b() -> Trainer.Config:
    """Pretrain EXAONE 4.0 32B, before its context is extended.

    32B parameters. Sizes: huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 102_400, "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27_392, "head_dim": 128,
        "num_attention_heads": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
    }  # fmt: skip
    return pretraining(published_model("exaone4", sizes), sequence_length=4096, peak=2e-4, max_steps=500_000)
