"""Phi-3-mini (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905), with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def phi3_mini() -> Trainer.Config:
    """Pretrain Phi-3-mini.

    3.82B parameters. Sizes: huggingface.co/microsoft/Phi-3-mini-4k-instruct/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 32_064, "num_hidden_layers": 32, "hidden_size": 3072, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "sliding_window": 2047,
    }  # fmt: skip
    return pretraining(published_model("phi3", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def phi4() -> Trainer.Config:
    """Pretrain Phi-4.

    14.7B parameters. Sizes: huggingface.co/microsoft/phi-4/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 100_352, "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17_920,
        "num_attention_heads": 40, "num_key_value_heads": 10, "rms_norm_eps": 1e-5, "rope_theta": 250_000.0,
    }  # fmt: skip
    return pretraining(published_model("phi3", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
