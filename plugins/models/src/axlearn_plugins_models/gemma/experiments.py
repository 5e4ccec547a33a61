"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786), with published sizes."""

from typing import Any

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

GEMMA_2 = {
    "vocab_size": 256_000, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
"""Sizes that both Gemma 2 models share."""


def gemma_2b() -> Trainer.Config:
    """Pretrain Gemma 2B on 3 trillion tokens.

    2.51B parameters. Sizes: huggingface.co/google/gemma-2b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 256_000, "num_hidden_layers": 18, "hidden_size": 2048, "intermediate_size": 16_384,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
    }  # fmt: skip
    return pretraining(published_model("gemma", sizes), sequence_length=8192, peak=3e-4, max_steps=360_000)


def gemma_7b() -> Trainer.Config:
    """Pretrain Gemma 7B on 6 trillion tokens.

    8.54B parameters. Sizes: huggingface.co/google/gemma-7b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 256_000, "num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 24_576,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    }  # fmt: skip
    return pretraining(published_model("gemma", sizes), sequence_length=8192, peak=3e-4, max_steps=720_000)


def gemma2_2b() -> Trainer.Config:
    """Pretrain Gemma 2 2B on 2 trillion tokens.

    2.61B parameters. Sizes: huggingface.co/google/gemma-2-2b/blob/main/config.json.
    """
    return _gemma2(
        num_hidden_layers=26, hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_key_value_heads=4
    )


def gemma2_9b() -> Trainer.Config:
    """Pretrain Gemma 2 9B on 8 trillion tokens.

    9.24B parameters. Sizes: huggingface.co/google/gemma-2-9b/blob/main/config.json.
    """
    return _gemma2(
        num_hidden_layers=42, hidden_size=3584, intermediate_size=14_336, num_attention_heads=16, num_key_value_heads=8
    )


def gemma3_4b() -> Trainer.Config:
    """Pretrain the text model of Gemma 3 4B, with five sliding-window layers per global layer.

    3.88B parameters. Sizes: `text_config` of huggingface.co/google/gemma-3-4b-pt/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 262_208, "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10_240,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    return pretraining(published_model("gemma3_text", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)


def _gemma2(**sizes: Any) -> Trainer.Config:
    """Return a Gemma 2 experiment with these sizes, at its context length of 8192."""
    return pretraining(published_model("gemma2", GEMMA_2 | sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
