"""The text models of Llama 4 Scout and Maverick, with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

SIZES = {
    "vocab_size": 202_048, "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "num_experts_per_tok": 1, "attention_chunk_size": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
}  # fmt: skip
"""Sizes that both models share."""


def llama4_scout() -> Trainer.Config:
    """Pretrain the text model of Llama 4 Scout, a mixture of 16 experts and a shared expert.

    108B parameters, of which each token uses 17B.

    Sizes: `text_config` of huggingface.co/meta-llama/Llama-4-Scout-17B-16E/blob/main/config.json.
    """
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    sizes = {"num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True, "rope_scaling": rope}
    return pretraining(
        published_model("llama4_text", SIZES | sizes), sequence_length=8192, peak=3e-4, max_steps=500_000
    )


def llama4_maverick() -> Trainer.Config:
    """Pretrain the text model of Llama 4 Maverick, with 128 experts and a shared expert in every second layer.

    401B parameters, of which each token uses 17B.

    Sizes: `text_config` of huggingface.co/meta-llama/Llama-4-Maverick-17B-128E/blob/main/config.json.
    """
    sizes = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
    return pretraining(
        published_model("llama4_text", SIZES | sizes), sequence_length=8192, peak=3e-4, max_steps=500_000
    )
