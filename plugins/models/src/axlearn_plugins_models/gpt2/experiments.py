"""The smallest and the largest GPT-2 model (Radford et al., 2019), with the sizes from their `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def gpt2_124m() -> Trainer.Config:
    """Pretrain GPT-2 small.

    124M parameters. Sizes: huggingface.co/openai-community/gpt2/blob/main/config.json.
    """
    return _gpt2(layers=12, width=768, heads=12)


def gpt2_1_5b() -> Trainer.Config:
    """Pretrain GPT-2 XL.

    1.56B parameters. Sizes: huggingface.co/openai-community/gpt2-xl/blob/main/config.json.
    """
    return _gpt2(layers=48, width=1600, heads=25)


def _gpt2(*, layers: int, width: int, heads: int) -> Trainer.Config:
    """Return a GPT-2 experiment with these sizes, at its context length of 1024."""
    sizes = {"vocab_size": 50_257, "n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 1024}
    return pretraining(published_model("gpt2", sizes), sequence_length=1024, peak=6e-4, max_steps=300_000)
