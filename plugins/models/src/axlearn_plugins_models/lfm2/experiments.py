"""LFM2, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def _lfm2(width: int, hidden_dim: int, heads: int) -> Trainer.Config:
    sizes = {
        "vocab_size": 65_536, "num_hidden_layers": 16, "hidden_size": width, "block_ff_dim": hidden_dim,
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "num_attention_heads": heads, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("lfm2", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def lfm2_350m() -> Trainer.Config:
    """Pretrain LFM2 350M, with attention in six of sixteen layers.

    354M parameters. Sizes: huggingface.co/LiquidAI/LFM2-350M/blob/main/config.json.
    """
    return _lfm2(1024, 6656, 16)


def lfm2_700m() -> Trainer.Config:
    """Pretrain LFM2 700M, with attention in six of sixteen layers.

    742M parameters. Sizes: huggingface.co/LiquidAI/LFM2-700M/blob/main/config.json.
    """
    return _lfm2(1536, 10_240, 24)


def lfm2_1_2b() -> Trainer.Config:
    """Pretrain LFM2 1.2B, with attention in six of sixteen layers.

    1.17B parameters. Sizes: huggingface.co/LiquidAI/LFM2-1.2B/blob/main/config.json.
    """
    return _lfm2(2048, 12_288, 32)
