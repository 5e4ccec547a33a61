"""Helium 1 preview, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def helium1_2b() -> Trainer.Config:
    """Pretrain Helium 1 preview 2B on 2.5 trillion tokens.

    2.17B parameters. Sizes: huggingface.co/kyutai/helium-1-preview-2b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 48_000, "num_hidden_layers": 24, "hidden_size": 2560, "intermediate_size": 7040,
        "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "rope_theta": 100_000.0,
    }  # fmt: skip
    return pretraining(published_model("helium", sizes), sequence_length=4096, peak=3e-4, max_steps=600_000)
