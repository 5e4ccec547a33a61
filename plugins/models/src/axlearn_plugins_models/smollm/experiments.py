"""SmolLM 3, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def smollm3_3b() -> Trainer.Config:
    """Pretrain SmolLM 3 3B.

    3.08B parameters. Sizes: huggingface.co/HuggingFaceTB/SmolLM3-3B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 128_256, "num_hidden_layers": 36, "hidden_size": 2048, "intermediate_size": 11_008,
        "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 5_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("smollm3", sizes), sequence_length=4096, peak=2e-4, max_steps=500_000)
