"""Granite 4 and Bamba (Mamba-2 with a few attention layers), with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

GRANITE_4 = {
    "vocab_size": 100_352, "num_hidden_layers": 40, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "position_embedding_type": "nope",
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes that both Granite 4 models share."""


def granite4_h_micro() -> Trainer.Config:
    """Pretrain Granite 4 H Micro, with attention in four of forty layers.

    3.19B parameters. Sizes: huggingface.co/ibm-granite/granite-4.0-h-micro/blob/main/config.json.
    """
    sizes = {
        "hidden_size": 2048, "shared_intermediate_size": 8192, "intermediate_size": 8192, "num_local_experts": 0,
        "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 64, "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    }  # fmt: skip
    return pretraining(
        published_model("granitemoehybrid", GRANITE_4 | sizes), sequence_length=4096, peak=3e-4, max_steps=500_000
    )


def granite4_h_tiny() -> Trainer.Config:
    """Pretrain Granite 4 H Tiny, with attention in four of forty layers and 64 experts in every layer.

    6.94B parameters, of which each token uses 1.5B. Sizes: huggingface.co/ibm-granite/granite-4.0-h-tiny/blob/main/config.json.
    """
    sizes = {
        "hidden_size": 1536, "shared_intermediate_size": 1024, "intermediate_size": 512, "num_local_experts": 64,
        "num_experts_per_tok": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
        "attention_multiplier": 0.0078125, "logits_scaling": 6.0,
    }  # fmt: skip
    return pretraining(
        published_model("granitemoehybrid", GRANITE_4 | sizes), sequence_length=4096, peak=3e-4, max_steps=500_000
    )


def bamba_9b() -> Trainer.Config:
    """Pretrain Bamba 9B, with attention in three of 32 layers.

    9.78B parameters. Sizes: huggingface.co/ibm-ai-platform/Bamba-9B-v1/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return pretraining(published_model("bamba", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
