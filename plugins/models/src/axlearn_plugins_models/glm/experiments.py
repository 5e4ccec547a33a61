"""GLM-4-9B and GLM-4-9B-0414, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

SIZES = {
    "vocab_size": 151_552, "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13_696, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 2, "rope_theta": 10_000.0,
}  # fmt: skip
"""Sizes that both models share."""


def glm4_9b_chat() -> Trainer.Config:
    """Pretrain GLM-4-9B.

    9.4B parameters. Sizes: huggingface.co/zai-org/glm-4-9b-hf/blob/main/config.json.
    """
    sizes = {
        **SIZES, "rms_norm_eps": 1.5625e-07,
    }  # fmt: skip
    return pretraining(published_model("glm", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)


def glm4_9b_0414() -> Trainer.Config:
    """Pretrain GLM-4-9B-0414.

    9.4B parameters. Sizes: huggingface.co/zai-org/GLM-4-9B-0414/blob/main/config.json.
    """
    sizes = {
        **SIZES, "rms_norm_eps": 1e-5, "attention_bias": False,
    }  # fmt: skip
    return pretraining(published_model("glm4", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
