"""Experiments with gpt-oss: the published sizes, and a toy."""

import axlearn_core as ax
from axlearn_core.extend import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
PUBLISHED = {
    "vocab_size": 201_088, "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_parameters": YARN,
}  # fmt: skip
TOY = {
    "vocab_size": 2048, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def gpt_oss_20b() -> Trainer.Config:
    """Pretrain gpt-oss-20b, a mixture of 32 experts. It has 20.9B parameters, and a token uses 3.6B.

    Sizes: huggingface.co/openai/gpt-oss-20b/blob/main/config.json.
    """
    return pretraining(published_model("gpt_oss", PUBLISHED), sequence_length=4096, peak=3e-4, max_steps=500_000)


def gpt_oss_120b() -> Trainer.Config:
    """Pretrain gpt-oss-120b, a mixture of 128 experts. It has 117B parameters, and a token uses 5.1B.

    Sizes: huggingface.co/openai/gpt-oss-120b/blob/main/config.json.
    """
    sizes = PUBLISHED | {"num_hidden_layers": 36, "num_local_experts": 128}
    return pretraining(published_model("gpt_oss", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def gpt_oss_toy() -> Trainer.Config:
    """Train a small gpt-oss on the quickstart's data, in about three minutes on two CPU cores.

    0.764M parameters.
    """
    model = ax.patch(published_model("gpt_oss", PUBLISHED | TOY), {"dtype": "float32"})
    return ax.patch(ax.resolve("quickstart").config, {"model": model})
