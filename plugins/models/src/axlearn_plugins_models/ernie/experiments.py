"""ERNIE 4.5 0.3B, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def ernie4_5_0_3b() -> Trainer.Config:
    """Pretrain ERNIE 4.5 0.3B.

    361M parameters. Sizes: huggingface.co/baidu/ERNIE-4.5-0.3B-PT/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 103_424, "num_hidden_layers": 18, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    }  # fmt: skip
    return pretraining(published_model("ernie4_5", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
