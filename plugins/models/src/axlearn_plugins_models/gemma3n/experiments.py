"""The text models of Gemma 3n (Gemma Team, 2025), with published sizes."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def gemma3n_e2b() -> Trainer.Config:
    """Pretrain the text model of Gemma 3n E2B, whose last 10 layers use the keys and values of earlier ones.

    4.44B parameters, of which 2.55B are in embeddings. Sizes: `text_config` of
    huggingface.co/google/gemma-3n-E2B/blob/main/config.json.
    """
    return _gemma3n(layers=30, shared=10, hidden=8192)


def gemma3n_e4b() -> Trainer.Config:
    """Pretrain the text model of Gemma 3n E4B, whose last 15 layers use the keys and values of earlier ones.

    6.84B parameters, of which 2.89B are in embeddings. Sizes: `text_config` of
    huggingface.co/google/gemma-3n-E4B/blob/main/config.json.
    """
    return _gemma3n(layers=35, shared=15, hidden=16_384)


def _gemma3n(*, layers: int, shared: int, hidden: int) -> Trainer.Config:
    """Return a Gemma 3n experiment with these sizes."""
    hf = {"num_hidden_layers": layers, "num_kv_shared_layers": shared, "intermediate_size": [hidden] * layers}
    model = published_model("gemma3n_text", {"vocab_size": 262_400, "hidden_size": 2048, **hf})
    return pretraining(model, sequence_length=8192, peak=3e-4, max_steps=500_000)
