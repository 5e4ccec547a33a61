"""Mistral 7B (arXiv 2310.06825) and Mixtral 8x7B (arXiv 2401.04088), with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

SIZES = {
    "vocab_size": 32_000, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Sizes that both models share."""


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
