"""Hunyuan 7B, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def hunyuan_7b() -> Trainer.Config:
    """Pretrain Hunyuan 7B.

    7.5B parameters. Sizes: huggingface.co/tencent/Hunyuan-7B-Pretrain/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 128_167, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_theta": 10_000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    }  # fmt: skip
    return pretraining(published_model("hunyuan_v1_dense", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
