"""Command R and Command R7B, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def command_r() -> Trainer.Config:
    """Pretrain Command R.

    35B parameters. Sizes: huggingface.co/CohereLabs/c4ai-command-r-v01/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 256_000, "num_hidden_layers": 40, "hidden_size": 8192, "intermediate_size": 22_528,
        "num_attention_heads": 64, "num_key_value_heads": 64, "rope_theta": 8_000_000.0, "logit_scale": 0.0625,
    }  # fmt: skip
    return pretraining(published_model("cohere", sizes), sequence_length=8192, peak=2e-4, max_steps=500_000)


def command_r7b() -> Trainer.Config:
    """Pretrain Command R7B.

    8.03B parameters. Sizes: huggingface.co/CohereLabs/c4ai-command-r7b-12-2024/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 256_000, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 50_000.0, "logit_scale": 0.25, "sliding_window": 4096,
    }  # fmt: skip
    return pretraining(published_model("cohere2", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
