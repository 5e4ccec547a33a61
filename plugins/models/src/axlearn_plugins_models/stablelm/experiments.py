"""StableLM 3B and StableLM 2 1.6B (arXiv 2402.17834), with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def stablelm_3b() -> Trainer.Config:
    """Pretrain StableLM 3B on 4 trillion tokens.

    2.8B parameters. Sizes: huggingface.co/stabilityai/stablelm-3b-4e1t/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 50_304, "num_hidden_layers": 32, "hidden_size": 2560, "intermediate_size": 6912,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    }  # fmt: skip
    return pretraining(published_model("stablelm", sizes), sequence_length=4096, peak=3.2e-4, max_steps=1_000_000)


def stablelm2_1_6b() -> Trainer.Config:
    """Pretrain StableLM 2 1.6B on 2 trillion tokens.

    1.64B parameters. Sizes: huggingface.co/stabilityai/stablelm-2-1_6b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 100_352, "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 32, "num_key_value_heads": 32, "use_qkv_bias": True,
    }  # fmt: skip
    return pretraining(published_model("stablelm", sizes), sequence_length=4096, peak=1e-3, max_steps=480_000)
