"""Model shapes to train and serve, with axlearn and with PyTorch. Does not import JAX."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama with rotary positions, RMSNorm, SwiGLU, no biases, and an untied output layer.

    Attributes:
        batch: Initial number of rows. It is halved until the batch fits.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    batch: int
    theta: float = 10_000.0

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        head = self.width // self.heads
        attention = 2 * self.width * head * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + 2 * self.vocab * self.width + self.width


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 8192, 32_000, 4096, 8),  # Llama 3.2 1B with Llama 2's vocabulary
    "3b": Shape(28, 3072, 24, 8, 8192, 32_000, 4096, 2),  # Llama 3.2 3B with Llama 2's vocabulary
    "7b-layers": Shape(4, 4096, 32, 32, 11_008, 32_000, 4096, 8),  # four layers of Llama 2 7B
    "7b": Shape(32, 4096, 32, 32, 11_008, 32_000, 4096, 1),
}
TOY = {
    "1b": Shape(2, 64, 4, 2, 128, 256, 64, 4),
    "3b": Shape(3, 64, 4, 2, 128, 256, 64, 2),
    "7b-layers": Shape(2, 64, 4, 4, 160, 256, 64, 4),
    "7b": Shape(2, 64, 4, 4, 160, 256, 64, 1),
}


def shape_of(name: str, *, rehearsal: bool) -> Shape:
    """Return a shape by name, or a toy shape in a rehearsal."""
    return (TOY if rehearsal else SHAPES)[name]


def settings_of(shape: Shape) -> dict[str, Any]:
    """Return the settings that give the experiment `llama2-7b` this shape."""
    return {
        "max_steps": 1000,
        "model.vocab_size": shape.vocab,
        "model.dtype": "bfloat16",
        "model.decoder.num_layers": shape.layers,
        "model.decoder.hidden_dim": shape.width,
        "model.decoder.layer.attention.num_heads": shape.heads,
        "model.decoder.layer.attention.num_kv_heads": shape.kv_heads,
        "model.decoder.layer.feed_forward.hidden_dim": shape.hidden,
        "model.decoder.layer.attention.position.theta": shape.theta,
        "learner.optimizer.learning_rate": RATE,
        "learner.optimizer.weight_decay": DECAY,
    }


RATE, DECAY, BETAS, EPS, CLIP = 3e-4, 0.1, (0.9, 0.95), 1e-8, 1.0
NORM_EPS = 1e-5
