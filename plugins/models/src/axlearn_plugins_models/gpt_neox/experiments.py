"""GPT-NeoX 20B (arXiv 2204.06745) and Pythia 1.4B (arXiv 2304.01373), with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def gpt_neox_20b() -> Trainer.Config:
    """Pretrain GPT-NeoX 20B on the Pile.

    20.6B parameters. Sizes: huggingface.co/EleutherAI/gpt-neox-20b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 50_432, "num_hidden_layers": 44, "hidden_size": 6144, "intermediate_size": 24_576,
        "num_attention_heads": 64, "hidden_act": "gelu_fast",
    }  # fmt: skip
    return pretraining(published_model("gpt_neox", sizes), sequence_length=2048, peak=1e-4, max_steps=150_000)


def pythia_1_4b() -> Trainer.Config:
    """Pretrain Pythia 1.4B on 300 billion tokens of the Pile.

    1.41B parameters. Sizes: huggingface.co/EleutherAI/pythia-1.4b/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 50_304, "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 16,
    }  # fmt: skip
    return pretraining(published_model("gpt_neox", sizes), sequence_length=2048, peak=2e-4, max_steps=143_000)
