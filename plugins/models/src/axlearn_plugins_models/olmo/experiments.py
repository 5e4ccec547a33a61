"""OLMo 2 (arXiv 2501.00656), OLMo 3 and OLMo Hybrid, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def olmo2_7b() -> Trainer.Config:
    """Pretrain OLMo 2 7B.

    7.3B parameters. Sizes: huggingface.co/allenai/OLMo-2-1124-7B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 100_352, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0,
    }  # fmt: skip
    return pretraining(published_model("olmo2", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def olmo2_32b() -> Trainer.Config:
    """Pretrain OLMo 2 32B.

    32.2B parameters. Sizes: huggingface.co/allenai/OLMo-2-0325-32B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 100_352, "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27_648,
        "num_attention_heads": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0,
    }  # fmt: skip
    return pretraining(published_model("olmo2", sizes), sequence_length=4096, peak=6e-4, max_steps=500_000)


def olmo3_7b() -> Trainer.Config:
    """Pretrain OLMo 3 7B, before its context is extended.

    7.3B parameters. Sizes: huggingface.co/allenai/Olmo-3-1025-7B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 100_278, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0, "sliding_window": 4096,
    }  # fmt: skip
    return pretraining(published_model("olmo3", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)


def olmo_hybrid_7b() -> Trainer.Config:
    """Pretrain OLMo Hybrid 7B, with a gated DeltaNet in three of four layers and no positions.

    7.43B parameters. Sizes: huggingface.co/allenai/Olmo-Hybrid-7B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 100_352, "num_hidden_layers": 32, "hidden_size": 3840, "intermediate_size": 11_008,
        "num_attention_heads": 30, "num_key_value_heads": 30, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": None},
        "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96, "linear_value_head_dim": 192,
        "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    }  # fmt: skip
    return pretraining(published_model("olmo_hybrid", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
