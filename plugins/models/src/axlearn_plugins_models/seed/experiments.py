"""Seed-OSS 36B, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def seed_oss_36b() -> Trainer.Config:
    """Pretrain Seed-OSS 36B.

    36.2B parameters. Sizes: huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 155_136, "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27_648, "head_dim": 128,
        "num_attention_heads": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 10_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("seed_oss", sizes), sequence_length=8192, peak=2e-4, max_steps=500_000)
