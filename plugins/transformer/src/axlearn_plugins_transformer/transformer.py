"""The transformer layer, and a decoder with a stack of layers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, factor_of, interface, node, setting
from axlearn_core.config.roles import states_role
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.cache_spec import check_returned, empty_cache, spec_of
from axlearn_plugins_transformer.embedding import Embedding, OutputHead, PositionEmbedding, TokenEmbedding
from axlearn_plugins_transformer.feed_forward import FeedForward, GatedFeedForward
from axlearn_plugins_transformer.layer_roles import (
    OutputHeadRole,
    SequentialRole,
    SplitDecoderRole,
    SplitLayerRole,
    WidthRole,
)
from axlearn_plugins_transformer.norm import Norm, RMSNorm
from axlearn_plugins_transformer.per_layer import PER_LAYER, PerLayerInputs
from axlearn_plugins_transformer.stack import LayerStack, Stack, StackLayer, each_layer, unstack
from axlearn_plugins_transformer.stack_layers import StackedCache, join_inputs, split_inputs, stack_cache_spec

RESIDUAL = ("batch", "residual_sequence", "activation_embed")
"""Logical axes of the residual stream."""
NO_HALF = Problem(
    path="",
    message="a layer needs attention, a feed-forward layer, or both",
    got="neither",
    fix="set attention or feed_forward",
)


class TransformerLayer(Layer):
    """`x + post_norm(attention(norm(x)))`, followed by the same computation with the feed-forward layer.

    With only `norm`, this is a pre-norm block. With `norm=None` and `post_norm`, only the output is normalized (OLMo 2).
    With both, input and output are normalized (Gemma 2). `norm_sum` applies `post_norm` after the residual sum, as in the
    original transformer. A layer without `attention` or without `feed_forward` has only the other half (Nemotron-H).
    """

    @node
    class Config(Layer.Config["TransformerLayer"], SplitLayerRole):
        """Settings for the layer.

        Attributes:
            attention: Attention layer, or None.
            feed_forward: Feed-forward layer, or None.
            norm: Norm of the input of each half; it is built once per half.
            post_norm: Norm of the output of each half; it is built once per half.
            norm_sum: Apply `post_norm` after the residual sum.
            residual_multiplier: Factor applied to the output of each half before the residual sum (the residual multiplier of
                Granite).
        """

        input_dim: int = interface(default=REQUIRED)
        attention: Node[AttentionLayer] | None = Attention.Config()
        feed_forward: Node[FeedForward] | None = GatedFeedForward.Config()
        norm: Node[Norm] | None = RMSNorm.Config()
        post_norm: Node[Norm] | None = None
        norm_sum: bool = False
        residual_multiplier: float = setting(default=1.0, gt=0, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Check that there is a half, and that `norm_sum` comes with `post_norm`."""
            yield from super().validate()
            if self.norm_sum and self.post_norm is None:
                yield Problem(
                    path="norm_sum", message="requires post_norm", fix="set post_norm, for example to a layer-norm"
                )
            if self.attention is None and self.feed_forward is None:
                yield NO_HALF

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        if cfg.attention is None and cfg.feed_forward is None:  # an `alternate` gives this layer neither
            raise ConfigError(attrs.evolve(NO_HALF, path="model.decoder.layer"))
        if cfg.attention is not None:
            self.attention = self.child(cfg.attention, rngs=rngs, input_dim=cfg.input_dim)
        if cfg.feed_forward is not None:
            self.feed_forward = self.child(cfg.feed_forward, rngs=rngs, input_dim=cfg.input_dim)
        for half, part in (("attention", cfg.attention), ("feed_forward", cfg.feed_forward)):
            for name, norm in (("norm", cfg.norm), ("post_norm", cfg.post_norm)):
                if part is not None and norm is not None:
                    setattr(self, f"{half}_{name}", self.child(norm, rngs=rngs, dim=cfg.input_dim))

    def cache_spec(self) -> Any:
        """Return the entries of the cache; see `KeepsCache`."""
        return () if self.cfg.attention is None else spec_of(self.attention)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        x, cache = self.attention_half(x, context, cache)
        return self.feed_forward_half(x), cache

    def attention_half(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply attention, if there is any, and its residual sum; see `SplitLayerRole`."""
        if self.cfg.attention is None:
            return x, cache
        y, returned = self.attention(self._pre_norm("attention", x), context, cache)
        if cache is not None:
            check_returned(self.attention, cache, returned)
        return self._add_residual("attention", x, y), returned

    def feed_forward_half(self, x: jax.Array) -> jax.Array:
        """Apply the feed-forward layer, if there is one, and its residual sum; see `SplitLayerRole`."""
        if self.cfg.feed_forward is None:
            return x
        return self._add_residual("feed_forward", x, self.feed_forward(self._pre_norm("feed_forward", x)))

    def _pre_norm(self, half: str, x: jax.Array) -> jax.Array:
        return x if self.cfg.norm is None else getattr(self, f"{half}_norm")(x)

    def _add_residual(self, half: str, x: jax.Array, y: jax.Array) -> jax.Array:
        y, scale = constrain(y, *RESIDUAL), self.cfg.residual_multiplier
        norm = None if self.cfg.post_norm is None else getattr(self, f"{half}_post_norm")
        if norm is not None and not self.cfg.norm_sum:
            y = norm(y)
        y = x + (y if scale == 1 else y * scale)
        return norm(y) if norm is not None and self.cfg.norm_sum else y


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The caches of all layers.

    Attributes:
        layers: One entry per layer, with the arrays that its `cache_spec` declares, or a `StackedCache`.
        length: Number of used slots, int32 [] or [B]. Lowering it discards later tokens.
    """

    layers: Any
    length: jax.Array

    @classmethod
    def empty(cls, spec: tuple[Any, ...], rows: int, length: int) -> "Cache":
        """Return an empty cache for `rows` rows of at most `length` tokens, with the entries of each layer in `spec`."""
        return cls(empty_cache(spec, rows, length), jnp.zeros((), jnp.int32))


class Decoder(Layer):
    """Maps token ids to hidden states: an embedding, a stack of layers and a final norm."""

    @node
    class Config(Layer.Config["Decoder"], OutputHeadRole, SplitDecoderRole, WidthRole):
        """Settings for the decoder.

        Attributes:
            num_layers: Number of layers.
            hidden_dim: Width.
            embedding: Token embedding.
            position: Position embedding to add to the token embedding, for attention without a position encoding.
            layer: Config of the layers.
            stack: Runs the layers.
            norm: Final norm, or None.
            per_layer: Computes an input for each layer (see `PerLayerInputs`), or None.
            head: Output head. None uses the transposed embedding.
            output_multiplier: Factor applied to the final hidden states, and so to the logits (1 / `logits_scaling` of Granite): a
                number, or a node that builds one from the width.
        """

        vocab_size: int = interface(default=REQUIRED)
        num_layers: int = setting(default=REQUIRED, ge=1, le=2**16)
        hidden_dim: int = setting(default=REQUIRED, ge=1, le=2**24)
        embedding: Node[TokenEmbedding] = Embedding.Config()
        position: Node[PositionEmbedding] | None = None
        layer: Node[StackLayer] = TransformerLayer.Config()
        stack: Node[LayerStack] = Stack.Config()
        norm: Node[Norm] | None = RMSNorm.Config()
        per_layer: Node[PerLayerInputs] | None = setting(default=None, hide_default=True)
        head: Node[OutputHead] | None = None
        output_multiplier: float | Node[float] = setting(default=1.0, gt=0, hide_default=True)

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
        if cfg.per_layer is not None:
            widths = {"vocab_size": cfg.vocab_size, "input_dim": cfg.hidden_dim, "num_layers": cfg.num_layers}
            self.per_layer = self.child(cfg.per_layer, rngs=rngs, **widths)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed the tokens: int32 [B, S] -> [B, S, D]."""
        return self.embedding(tokens)

    def layer_inputs(self, tokens: jax.Array, embeddings: jax.Array) -> dict[str, jax.Array]:
        """Return an input for each layer by name, [B, L, ...] for L layers.

        A subclass may return others than those of `per_layer`. The layers read `Context.layer_inputs`.

        Args:
            tokens: int32 [B, S].
            embeddings: Their embeddings, [B, S, D].
        """
        return {} if self.cfg.per_layer is None else {PER_LAYER: self.per_layer(tokens, embeddings)}

    def __call__(
        self,
        tokens: jax.Array,
        context: Context,
        cache: Cache | None = None,
        embeddings: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Return the hidden states of the tokens, [B, S, D], and the new cache.

        Args:
            tokens: int32 [B, S]. With a cache, these follow the cached tokens.
            context: Context of the layers. Its `layer_inputs` are passed to them in addition to those of `layer_inputs`.
            cache: Cache from `Cache.empty` or an earlier call, or None.
            embeddings: Embeddings of the tokens, [B, S, D]. None calls `embed`.
        """
        x, context = self._embed(tokens, context, cache, embeddings)
        x, entries = self._run_layers(x, context, None if cache is None else cache.layers)
        return self._normalize(x), None if cache is None else Cache(entries, cache.length + tokens.shape[1])

    def begin(
        self, tokens: jax.Array, context: Context, cache: Cache, embeddings: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Run everything except the feed-forward half of the last layer and the final norm.

        If the layers are not separate, run the whole decoder. See `SplitDecoder`.
        """
        last = self._last_layer()
        if last is None:
            x, after = self(tokens, context, cache, embeddings)
            assert after is not None
            return x, after
        x, context = self._embed(tokens, context, cache, embeddings)
        *inputs, last_inputs = split_inputs(context.layer_inputs, len(self.layer))
        leading = dataclasses.replace(context, layer_inputs=join_inputs(inputs))
        x, entries = self.cfg.stack.build()(nnx.List(self.layer[:-1]), x, leading, cache.layers[:-1])
        context = dataclasses.replace(context, layer_inputs=last_inputs)
        x, entry = last.attention_half(constrain(x, *RESIDUAL), context, cache.layers[-1])
        return x, Cache((*entries, entry), cache.length + tokens.shape[1])

    def finish(self, x: jax.Array) -> jax.Array:
        """Compute the hidden states from outputs of `begin`; see `SplitDecoder`."""
        last = self._last_layer()
        return x if last is None else self._normalize(last.feed_forward_half(x))

    def _run_layers(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Run all layers: [B, S, D] and the entries of the cache -> ([B, S, D], new entries). A subclass may wrap this."""
        return self.cfg.stack.build()(self.layer, x, context, cache)

    def _embed(
        self, tokens: jax.Array, context: Context, cache: Cache | None, embeddings: jax.Array | None
    ) -> tuple[jax.Array, Context]:
        """Return the input of the first layer, [B, S, D], and a context with the cache slots and the layers' inputs."""
        x = self.embed(tokens) if embeddings is None else embeddings
        # A new dict for `shared`, because layers write to it.
        inputs = {**context.layer_inputs, **self.layer_inputs(tokens, x)}
        context = dataclasses.replace(context, layer_inputs=inputs, shared={})
        if cache is not None and context.slots is None:
            slots = jnp.reshape(cache.length, (-1, 1)) + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = slots if context.positions is None else context.positions
            context = dataclasses.replace(context, slots=slots, positions=positions)
        if self.cfg.position is not None:
            default = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            x = x + jnp.broadcast_to(
                self.position(default if context.positions is None else context.positions), x.shape
            )
        return constrain(x, *RESIDUAL), context

    def _normalize(self, x: jax.Array) -> jax.Array:
        x = x if self.cfg.norm is None else self.norm(x)
        scale = factor_of(self.cfg.output_multiplier, width=self.cfg.hidden_dim)
        return x if scale == 1 else x * scale

    def _last_layer(self) -> Any:
        """Return a copy of the last separate layer, which any trace may modify.

        Returns None if `begin` runs everything.
        """
        if not isinstance(self.layer, nnx.List) or len(self.layer) < 2:
            return None
        last = self.layer[-1]
        splittable = (
            states_role(self.cfg, SplitDecoderRole)
            and states_role(self.cfg.stack, SequentialRole)
            and isinstance(last, Layer)
            and states_role(last.cfg, SplitLayerRole)
        )
        return nnx.merge(*nnx.split(last), copy=True) if splittable else None

    def cache_spec(self) -> tuple[Any, ...]:
        """Return the entries of each layer's cache; see `KeepsCache`."""
        return tuple(spec_of(layer) for layer in each_layer(self.layer, self.cfg.num_layers))

    def stacked_cache_spec(self) -> StackedCache:
        """Return the entries of the cache with which the layers run as a scan over their stacked arrays; see `KeepsCache`.

        Raises:
            RequestError: The layers cannot run as a scan with a cache.
        """
        return stack_cache_spec(self.layer, self.cache_spec())

    def unstacked(self) -> "Decoder":
        """Return a copy of this decoder with separate layers. The copy shares all other parameters."""
        copy = nnx.merge(*nnx.split(self))
        copy.layer = unstack(self.layer, self.cfg.num_layers)
        return copy

    def head_weight(self) -> jax.Array:
        """Return the output weight, [D, V]."""
        return (self.embedding if self.cfg.head is None else self.head).head_weight()
