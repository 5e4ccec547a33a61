"""The `captioner` component."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.extend import Batch, Linear, node, setting
from axlearn_plugins_transformer.causal_lm import CausalLM

IMAGE = 0
"""Token at the position of an image: the byte 0, which no text contains."""


class Captioner(CausalLM):
    """A causal language model that reads an image at the tokens `IMAGE`."""

    @node
    class Config(CausalLM.Config):
        """Settings of `CausalLM`, and the size of an image.

        Attributes:
            pixels: Number of pixels of an image.
        """

        pixels: int = setting(default=64, ge=1)

    def __init__(self, cfg: Config, *, rngs: Any):
        super().__init__(cfg, rngs=rngs)
        sizes = {"input_dims": (cfg.pixels,), "output_dims": (self.decoder.cfg.hidden_dim,)}
        self.projector = self.child(Linear.Config(), rngs=rngs, axes=(None, "embed"), **sizes)

    def embed(self, inputs: Batch) -> jax.Array:
        """Embed the tokens, and the images [B, pixels] at their tokens. Decoding steps have no images."""
        x = super().embed(inputs)
        if "images" not in inputs:
            return x
        return jnp.where((inputs["tokens"] == IMAGE)[..., None], self.projector(inputs["images"])[:, None], x)
