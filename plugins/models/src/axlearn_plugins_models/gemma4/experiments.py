"""The text models of Gemma 4 (Google DeepMind, 2026), with published sizes."""

from typing import Any

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

SIZES = {
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
}
"""Sizes that all models share."""
PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "sliding_window": 512}
LARGE = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "attention_k_eq_v": True}


def gemma4_e2b() -> Trainer.Config:
    """Pretrain the text model of Gemma 4 E2B, whose last 20 layers use the keys and values of earlier ones.

    4.63B parameters, of which 2.75B are in embeddings. Sizes: `text_config` of
    huggingface.co/google/gemma-4-E2B/blob/main/config.json.
    """
    kinds = [*["sliding_attention"] * 4, "full_attention"]
    return _gemma4(
        **PER_LAYER, num_hidden_layers=35, hidden_size=1536, intermediate_size=6144, num_attention_heads=8,
        num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=kinds * 7,
    )  # fmt: skip


def gemma4_e4b() -> Trainer.Config:
    """Pretrain the text model of Gemma 4 E4B, whose last 18 layers use the keys and values of earlier ones.

    7.46B parameters, of which 3.49B are in embeddings. Sizes: `text_config` of
    huggingface.co/google/gemma-4-E4B/blob/main/config.json.
    """
    return _gemma4(
        **PER_LAYER, num_hidden_layers=42, hidden_size=2560, intermediate_size=10_240, num_attention_heads=8,
        num_key_value_heads=2, num_kv_shared_layers=18,
    )  # fmt: skip


def gemma4_31b() -> Trainer.Config:
    """Pretrain the text model of Gemma 4 31B.

    30.7B parameters. Sizes: `text_config` of huggingface.co/google/gemma-4-31B/blob/main/config.json.
    """
    return _gemma4(
        **LARGE, num_hidden_layers=60, hidden_size=5376, intermediate_size=21_504, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4,
    )  # fmt: skip


def gemma4_26b_a4b() -> Trainer.Config:
    """Pretrain the text model of Gemma 4 26B A4B, with 128 experts next to each feed-forward layer.

    25.2B parameters, of which each token uses 3.8B. Sizes: `text_config` of
    huggingface.co/google/gemma-4-26B-A4B/blob/main/config.json.
    """
    return _gemma4(
        **LARGE, num_hidden_layers=30, hidden_size=2816, intermediate_size=2112, num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    )  # fmt: skip


def _gemma4(**sizes: Any) -> Trainer.Config:
    """Return a Gemma 4 experiment with these sizes."""
    return pretraining(
        published_model("gemma4_text", SIZES | sizes), sequence_length=8192, peak=3e-4, max_steps=500_000
    )
