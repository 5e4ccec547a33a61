"""Models that add inputs and losses to a causal language model, and layers that share values."""

import attrs
import jax.numpy as jnp

from axlearn_core.config import node, patch, replace_config
from axlearn_core.nn import summaries
from axlearn_core.nn.linear import Linear
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.embedding import Embedding
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

IMAGE, FEATURES = 2, 3
"""Token id at the position of an image, and the size of its features."""


class Captioner(CausalLM):
    """A model that reads `images`, float32 [B, 3], at image tokens, and also predicts the second-next token."""

    @node
    class Config(CausalLM.Config):
        pass

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        width = self.decoder.cfg.hidden_dim
        linear = {"rngs": rngs, "output_dims": (width,)}
        self.projector = self.child(Linear.Config(), input_dims=(FEATURES,), axes=(None, "embed"), **linear)
        self.second = self.child(Linear.Config(), input_dims=(width,), axes=("embed", "mlp"), **linear)

    def embed(self, inputs):
        x = super().embed(inputs)
        if "images" not in inputs:
            return x
        images = self.projector(inputs["images"])[:, None]
        return jnp.where((inputs["tokens"] == IMAGE)[..., None], images, x)

    def losses(self, hidden, batch):
        loss, report = super().losses(hidden, batch)
        later = {"targets": jnp.roll(batch["targets"], -1, axis=1)}
        summaries.add_loss("second_token", 0.3 * super().losses(jnp.tanh(self.second(hidden)), later)[0])
        return loss, report


class PerLayerDecoder(Decoder):
    """A decoder with an embedding of each token for each layer."""

    @node
    class Config(Decoder.Config):
        pass

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        size = cfg.num_layers * cfg.hidden_dim
        self.per_layer = self.child(Embedding.Config(), rngs=rngs, vocab_size=cfg.vocab_size, dim=size)

    def layer_inputs(self, tokens, embeddings):
        rows, length, width = embeddings.shape
        values = self.per_layer(tokens).reshape(rows, length, -1, width)
        return {"per_layer": jnp.moveaxis(values, 2, 1)}


class PerLayerBlock(TransformerLayer):
    """A transformer layer that adds its own embedding of each token."""

    @node
    class Config(TransformerLayer.Config):
        pass

    def __call__(self, x, context, cache=None):
        return super().__call__(x + context.layer_inputs["per_layer"], context, cache)


def per_layer(cfg):
    """Return the config of a model with per-layer embeddings."""
    cfg = replace_config(cfg, Decoder, PerLayerDecoder.Config())
    return replace_config(cfg, TransformerLayer, PerLayerBlock.Config())


class Successor(CausalLM):
    """A model whose next token depends only on the last one, with heads that draft `right` tokens correctly and one wrong one."""

    @node
    class Config(CausalLM.Config):
        right: int = 2

    def hidden_states(self, batch, context=None, cache=None):
        hidden, cache = super().hidden_states(batch, context, cache)
        return hidden * 0 + self.embed(batch), cache

    def draft(self, hidden, tokens):
        drafts = []
        for number in range(self.cfg.right + 1):
            tokens = jnp.argmax(self.logits(self.embed({"tokens": tokens[:, None]}))[:, 0], -1)
            drafts.append(tokens if number < self.cfg.right else (tokens + 1) % self.vocab_size)
        return jnp.stack(drafts, 1)


class DraftingCaptioner(Captioner):
    """A captioner that drafts with the head of its second token."""

    @node
    class Config(Captioner.Config):
        pass

    def draft(self, hidden, tokens):
        return jnp.argmax(self.logits(jnp.tanh(self.second(hidden))), -1)


def extended(cfg):
    """Return the config of a captioner with per-layer embeddings, whose later layers use the keys of the first."""
    attention = cfg.decoder.layer.attention
    sources = attrs.evolve(attention, kv_name="kv")
    borrowers = attrs.evolve(attention, key=None, value=None, kv_source="kv")
    cfg = patch(cfg, {"decoder.layer.attention": Alternate(children=(borrowers,), first=(sources,))})
    return per_layer(replace_config(cfg, CausalLM, Captioner.Config()))
