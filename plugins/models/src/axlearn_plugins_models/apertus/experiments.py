"""Apertus 8B (arXiv 2509.14233), with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def apertus_8b() -> Trainer.Config:
    """Pretrain Apertus 8B on 15 trillion tokens.

    8.05B parameters. Sizes: huggingface.co/swiss-ai/Apertus-8B-2509/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 131_072, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 21_504,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 12_000_000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }  # fmt: skip
    return pretraining(published_model("apertus", sizes), sequence_length=4096, peak=1.1e-4, max_steps=3_600_000)
