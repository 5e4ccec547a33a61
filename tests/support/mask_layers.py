"""Attention layers of another package, whose masks are not only causal with a window."""

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.config import node, patch, replace_config
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention
from axlearn_plugins_transformer.kernels import masks

CHUNK, PREFIX, OFFSETS, SELECTED = 6, 5, 12, 3


class ChunkedAttention(Attention):
    """Attention in chunks, as in Llama 4."""

    @node
    class Config(Attention.Config):
        """The settings of `Attention`."""

    def mask(self, context):
        return super().mask(context) & masks.chunked(context, CHUNK)


class PrefixAttention(Attention):
    """Attention in both directions between the first tokens, and causal attention after them."""

    @node
    class Config(Attention.Config):
        """The settings of `Attention`."""

    def mask(self, context):
        return masks.with_prefix(context, PREFIX)


class SelectiveAttention(Attention):
    """Each token attends to itself and to the top-k of the distances that its query scores."""

    @node
    class Config(Attention.Config):
        """The settings of `Attention`."""

    def scores(self, query, key, value, context):
        op = super().scores(query, key, value, context)
        length = query.shape[1]
        own = jnp.arange(length, dtype=jnp.int32)[None] if context.slots is None else context.positions
        distances = jax.lax.top_k(query[:, :, 0, :OFFSETS], SELECTED)[1].astype(jnp.int32) + 1
        slots = own[..., None] - jnp.concatenate([jnp.zeros_like(distances[..., :1]), distances], axis=-1)
        return attrs.evolve(op, mask=op.mask & masks.SelectedKeys(slots))


class ChunkedLatentAttention(LatentAttention):
    """Latent attention in chunks."""

    @node
    class Config(LatentAttention.Config):
        """The settings of `LatentAttention`."""

    def mask(self, context):
        return super().mask(context) & masks.chunked(context, CHUNK)


LAYERS = {"chunks": ChunkedAttention, "prefix": PrefixAttention, "selected": SelectiveAttention}


def config(base, name, **edits):
    """Return a model's config with one of the layers instead of `Attention`."""
    return patch(replace_config(base, Attention, LAYERS[name].Config()), edits)
