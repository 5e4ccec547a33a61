"""OLMo 1B and 7B (arXiv 2402.00838), with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining

VOCABULARY = 50_304


def olmo_1b() -> Trainer.Config:
    """Pretrain OLMo 1B on 3 trillion tokens.

    1.18B parameters. Sizes: huggingface.co/allenai/OLMo-1B-hf/blob/main/config.json.
    """
    sizes = {
        "vocab_size": VOCABULARY, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    return pretraining(published_model("olmo", sizes), sequence_length=2048, peak=4e-4, max_steps=740_000)


def olmo_7b() -> Trainer.Config:
    """Pretrain OLMo 7B on 2.5 trillion tokens.

    6.89B parameters. Sizes: huggingface.co/allenai/OLMo-7B-hf/blob/main/config.json.
    """
    sizes = {
        "vocab_size": VOCABULARY, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_attention_heads": 32,
    }  # fmt: skip
    return pretraining(published_model("olmo", sizes), sequence_length=2048, peak=3e-4, max_steps=560_000)
