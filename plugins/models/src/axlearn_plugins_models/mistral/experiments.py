"""Mistral 7B (arXiv 2310.06825), Mixtral 8x7B (arXiv 2401.04088) and Ministral, with the sizes from their `config.json`."""

from typing import Any

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.layer_cycle import FULL, SLIDING
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

SIZES = {
    "vocab_size": 32_000, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Sizes that Mistral and Mixtral share."""
MINISTRAL = {
    "vocab_size": 131_072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
"""Sizes that all Ministral models share."""


def mistral_7b() -> Trainer.Config:
    """Pretrain Mistral 7B, with a sliding window of 4096 tokens.

    7.24B parameters. Sizes: huggingface.co/mistralai/Mistral-7B-v0.1/blob/main/config.json.
    """
    model = published_model("mistral", SIZES | {"rope_theta": 10_000.0, "sliding_window": 4096})
    return pretraining(model, sequence_length=8192, peak=3e-4, max_steps=500_000)


def mixtral_8x7b() -> Trainer.Config:
    """Pretrain Mixtral 8x7B, a mixture of experts.

    46.7B parameters, of which each token uses 12.9B.

    Sizes: huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json.
    """
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1_000_000.0}
    return pretraining(published_model("mixtral", SIZES | experts), sequence_length=8192, peak=3e-4, max_steps=500_000)


def ministral_8b() -> Trainer.Config:
    """Pretrain Ministral 8B, with a window of 32,768 tokens in three of four layers.

    8.02B parameters. Sizes: huggingface.co/mistralai/Ministral-8B-Instruct-2410/blob/main/config.json.
    """
    sizes = {
        "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12_288, "rope_theta": 100_000_000.0,
        "sliding_window": 32_768, "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 9,
    }  # fmt: skip
    return pretraining(
        published_model("ministral", MINISTRAL | sizes), sequence_length=8192, peak=3e-4, max_steps=500_000
    )


def _ministral3(sizes: dict[str, Any], theta: float = 1_000_000.0) -> Trainer.Config:
    rope = {
        "rope_type": "yarn", "rope_theta": theta, "factor": 16.0, "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    model = published_model("ministral3", {**MINISTRAL, **sizes, "rope_parameters": rope})
    return pretraining(model, sequence_length=16_384, peak=3e-4, max_steps=500_000)


def ministral3_3b() -> Trainer.Config:
    """Pretrain the text model of Ministral 3 3B.

    3.43B parameters. Sizes: `text_config` of huggingface.co/mistralai/Ministral-3-3B-Base-2512/blob/main/config.json.
    """
    sizes = {"num_hidden_layers": 26, "hidden_size": 3072, "intermediate_size": 9216, "tie_word_embeddings": True}
    return _ministral3(sizes)


def ministral3_8b() -> Trainer.Config:
    """Pretrain the text model of Ministral 3 8B.

    8.49B parameters. Sizes: `text_config` of huggingface.co/mistralai/Ministral-3-8B-Base-2512/blob/main/config.json.
    """
    return _ministral3({"num_hidden_layers": 34, "hidden_size": 4096, "intermediate_size": 14_336})


def ministral3_14b() -> Trainer.Config:
    """Pretrain the text model of Ministral 3 14B.

    13.5B parameters. Sizes: `text_config` of huggingface.co/mistralai/Ministral-3-14B-Base-2512/blob/main/config.json.
    """
    sizes = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 16_384}
    return _ministral3(sizes, theta=1_000_000_000.0)
