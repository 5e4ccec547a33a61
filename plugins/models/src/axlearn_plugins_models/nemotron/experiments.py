"""Minitron 4B (arXiv 2407.14679), with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def minitron_4b() -> Trainer.Config:
    """Pretrain a model of Minitron 4B's size from scratch. The published model was pruned from Nemotron-4 15B.

    4.19B parameters. Sizes: huggingface.co/nvidia/Minitron-4B-Base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 256_000, "num_hidden_layers": 32, "hidden_size": 3072, "intermediate_size": 9216,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    return pretraining(published_model("nemotron", sizes), sequence_length=4096, peak=3e-4, max_steps=300_000)
