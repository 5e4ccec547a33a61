"""CWM 32B, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def cwm_32b() -> Trainer.Config:
    """Pretrain CWM 32B, with the positions of its long-context phase.

    32.6B parameters. Sizes: huggingface.co/facebook/cwm/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 128_256, "num_hidden_layers": 64, "hidden_size": 6144, "intermediate_size": 21_504, "head_dim": 128,
        "num_attention_heads": 48, "num_key_value_heads": 8, "sliding_window": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "high_freq_factor": 4.0,
                            "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    }  # fmt: skip
    return pretraining(published_model("cwm", sizes), sequence_length=8192, peak=8e-4, max_steps=500_000)
