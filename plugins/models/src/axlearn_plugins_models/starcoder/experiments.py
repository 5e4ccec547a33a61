"""StarCoder 2 (arXiv 2402.19173), with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def starcoder2_3b() -> Trainer.Config:
    """Pretrain StarCoder 2 3B.

    3.03B parameters. Sizes: huggingface.co/bigcode/starcoder2-3b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 49_152, "num_hidden_layers": 30, "hidden_size": 3072, "intermediate_size": 12_288,
        "num_attention_heads": 24, "num_key_value_heads": 2, "rope_theta": 999_999.4420358813, "sliding_window": 4096,
    }  # fmt: skip
    return pretraining(published_model("starcoder2", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def starcoder2_7b() -> Trainer.Config:
    """Pretrain StarCoder 2 7B.

    7.17B parameters. Sizes: huggingface.co/bigcode/starcoder2-7b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 49_152, "num_hidden_layers": 32, "hidden_size": 4608, "intermediate_size": 18_432,
        "num_attention_heads": 36, "num_key_value_heads": 4, "rope_theta": 1_000_000.0, "sliding_window": 4096,
    }  # fmt: skip
    return pretraining(published_model("starcoder2", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
