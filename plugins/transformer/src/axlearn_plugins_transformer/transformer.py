"""The transformer layer, and the decoder made of a stack of them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.config.roles import states_role
from axlearn_core.errors import Problem
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.embedding import Embedding, OutputHead, PositionEmbedding, TokenEmbedding
from axlearn_plugins_transformer.feed_forward import FeedForward, GatedFeedForward
from axlearn_plugins_transformer.layer_roles import OneByOneRole, OutputHeadRole, TwoHalvesRole, TwoPartRole
from axlearn_plugins_transformer.norm import Norm, RMSNorm
from axlearn_plugins_transformer.stack import LayerStack, Stack, StackLayer, each_layer, unstack

RESIDUAL = ("batch", "residual_sequence", "activation_embed")
"""The logical axes of what goes from block to block."""


class TransformerLayer(Layer):
    """`x + post(attention(norm(x)))`, then the same with the feed-forward layer.

    With `norm` alone these are pre-norm blocks; with `norm=None` and `post_norm` the output is normalised (OLMo 2);
    with both, both are (Gemma 2). `norm_sum` moves `post_norm` behind the residual sum, as in the original transformer.
    """

    @node
    class Config(Layer.Config["TransformerLayer"], TwoHalvesRole):
        """Each norm node is built twice, once for either half."""

        input_dim: int = interface(default=REQUIRED)
        attention: Node[AttentionLayer] = Attention.Config()
        feed_forward: Node[FeedForward] = GatedFeedForward.Config()
        norm: Node[Norm] | None = RMSNorm.Config()
        post_norm: Node[Norm] | None = None
        norm_sum: bool = False

        def validate(self) -> Iterable[Problem]:
            """`norm_sum` without what it moves."""
            yield from super().validate()
            if self.norm_sum and self.post_norm is None:
                yield Problem(
                    path="norm_sum", message="needs post_norm", fix="set post_norm, for example to a layer-norm"
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.attention = self.child(cfg.attention, rngs=rngs, input_dim=cfg.input_dim)
        self.feed_forward = self.child(cfg.feed_forward, rngs=rngs, input_dim=cfg.input_dim)
        for half in ("attention", "feed_forward"):
            for name, norm in (("norm", cfg.norm), ("post_norm", cfg.post_norm)):
                if norm is not None:
                    setattr(self, f"{half}_{name}", self.child(norm, rngs=rngs, dim=cfg.input_dim))

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of at most `length` tokens."""
        return self.attention.init_cache(batch, length)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and its cache -> ([B, S, D], the new cache)."""
        x, cache = self.attention_half(x, context, cache)
        return self.feed_forward_half(x), cache

    def attention_half(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """See `TwoHalvesRole`."""
        y, cache = self.attention(self._before("attention", x), context, cache)
        return self._after("attention", x, y), cache

    def feed_forward_half(self, x: jax.Array) -> jax.Array:
        """See `TwoHalvesRole`."""
        return self._after("feed_forward", x, self.feed_forward(self._before("feed_forward", x)))

    def _before(self, half: str, x: jax.Array) -> jax.Array:
        return x if self.cfg.norm is None else getattr(self, f"{half}_norm")(x)

    def _after(self, half: str, x: jax.Array, y: jax.Array) -> jax.Array:
        y = constrain(y, *RESIDUAL)
        if self.cfg.post_norm is None:
            return x + y
        norm = getattr(self, f"{half}_post_norm")
        return norm(x + y) if self.cfg.norm_sum else x + norm(y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The caches of all layers.

    Attributes:
        layers: one entry per layer, in the layout of the attention's `kv_cache`.
        length: int32 [] or [B], how many slots are taken. Setting it back forgets what came after.
    """

    layers: tuple[Any, ...]
    length: jax.Array


class Decoder(Layer):
    """Token ids to hidden states: an embedding, a stack of layers, a final norm."""

    @node
    class Config(Layer.Config["Decoder"], OutputHeadRole, TwoPartRole):
        """`hidden_dim` is the width. Without a `head` the output layer is the embedding transposed.

        `position` is added to the embeddings, for models whose attention has no positions of its own.
        """

        vocab_size: int = interface(default=REQUIRED)
        num_layers: int = setting(default=REQUIRED, ge=1, le=2**16)
        hidden_dim: int = setting(default=REQUIRED, ge=1, le=2**24)
        embedding: Node[TokenEmbedding] = Embedding.Config()
        position: Node[PositionEmbedding] | None = None
        layer: Node[StackLayer] = TransformerLayer.Config()
        stack: Node[LayerStack] = Stack.Config()
        norm: Node[Norm] | None = RMSNorm.Config()
        head: Node[OutputHead] | None = None

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        sizes = {"vocab_size": cfg.vocab_size, "dim": cfg.hidden_dim}
        self.embedding = self.child(cfg.embedding, rngs=rngs, **sizes)
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, dim=cfg.hidden_dim)
        self.layer = cfg.stack.build().init(
            lambda layer, rngs: self.child(layer, rngs=rngs, input_dim=cfg.hidden_dim), cfg.layer, cfg.num_layers, rngs
        )
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.hidden_dim)
        if cfg.head is not None:
            self.head = self.child(cfg.head, rngs=rngs, **sizes)

    def __call__(
        self, tokens: jax.Array, context: Context, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """int32 [B, S], with a cache the tokens after those in it -> ([B, S, D], the new cache)."""
        x, context = self._embed(tokens, context, cache)
        x, entries = self.cfg.stack.build()(self.layer, x, context, None if cache is None else cache.layers)
        return self._normalized(x), None if cache is None else Cache(entries, cache.length + tokens.shape[1])

    def begin(self, tokens: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `TwoPartDecoder`: all but the second half of the last layer and the norm, where the layers are separate."""
        last = self._last_layer()
        if last is None:
            x, after = self(tokens, context, cache)
            assert after is not None
            return x, after
        x, context = self._embed(tokens, context, cache)
        x, entries = self.cfg.stack.build()(nnx.List(self.layer[:-1]), x, context, cache.layers[:-1])
        x, entry = last.attention_half(constrain(x, *RESIDUAL), context, cache.layers[-1])
        return x, Cache((*entries, entry), cache.length + tokens.shape[1])

    def finish(self, x: jax.Array) -> jax.Array:
        """See `TwoPartDecoder`."""
        last = self._last_layer()
        return x if last is None else self._normalized(last.feed_forward_half(x))

    def _embed(self, tokens: jax.Array, context: Context, cache: Cache | None) -> tuple[jax.Array, Context]:
        """What the first layer takes: [B, S, D], and where in the cache it goes."""
        x = self.embedding(tokens)
        if cache is not None and context.slots is None:
            slots = jnp.reshape(cache.length, (-1, 1)) + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = slots if context.positions is None else context.positions
            context = dataclasses.replace(context, slots=slots, positions=positions)
        if self.cfg.position is not None:
            at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            x = x + jnp.broadcast_to(self.position(at if context.positions is None else context.positions), x.shape)
        return constrain(x, *RESIDUAL), context

    def _normalized(self, x: jax.Array) -> jax.Array:
        return x if self.cfg.norm is None else self.norm(x)

    def _last_layer(self) -> Any:
        """A copy of the last of separate layers, whose variables any trace may write; None if `begin` does everything."""
        if not isinstance(self.layer, nnx.List) or len(self.layer) < 2:
            return None
        last = self.layer[-1]
        apart = (
            states_role(self.cfg, TwoPartRole)
            and states_role(self.cfg.stack, OneByOneRole)
            and isinstance(last, Layer)
            and states_role(last.cfg, TwoHalvesRole)
        )
        return nnx.merge(*nnx.split(last), copy=True) if apart else None

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `batch` rows of at most `length` tokens."""
        entries = tuple(x.init_cache(batch, length) for x in each_layer(self.layer, self.cfg.num_layers))
        return Cache(entries, jnp.zeros((), jnp.int32))

    def unstacked(self) -> "Decoder":
        """This decoder with separate layers; it shares the other parameters."""
        copy = nnx.merge(*nnx.split(self))
        copy.layer = unstack(self.layer, self.cfg.num_layers)
        return copy

    def head_weight(self) -> jax.Array:
        """[D, V]: the output layer."""
        return (self.embedding if self.cfg.head is None else self.head).head_weight()
