"""AFM-4.5B, with the sizes from `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def afm_4_5b() -> Trainer.Config:
    """Pretrain AFM-4.5B, before its context is extended.

    4.62B parameters. Sizes: huggingface.co/arcee-ai/AFM-4.5B-Base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 128_005, "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 18_432, "head_dim": 128,
        "num_attention_heads": 20, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    }  # fmt: skip
    return pretraining(published_model("arcee", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
