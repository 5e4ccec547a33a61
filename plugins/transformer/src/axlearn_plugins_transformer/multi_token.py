"""Multi-token prediction (MTP): heads that predict the tokens after the next one.

See DeepSeek-V3 (arXiv 2412.19437), section 2.2. Depth k = 1, 2, ... of position i reads the hidden state of depth k - 1 and the
embedding of token i + k, and predicts token i + k + 1. Depth 0 is the model itself. A depth has a layer of the model's own kind,
and shares the embedding and the output layer with the model.

Shapes: B rows, S positions, D width.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Node, node, setting
from axlearn_core.config.roles import StackRole
from axlearn_core.config.tree import children
from axlearn_core.contracts.parts import Batch
from axlearn_core.errors import Problem, RequestError
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.alternate import layer_configs
from axlearn_plugins_transformer.cache_spec import spec_of
from axlearn_plugins_transformer.causal_lm import CausalLM, EmbedsTokens, NewTokens, batch_context
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp
from axlearn_plugins_transformer.layer_roles import ExtraLossRole
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_transformer.stack import Stack
from axlearn_plugins_transformer.transformer import RESIDUAL

NEEDED = ("num_layers", "hidden_dim", "layer", "norm", "stack")
"""Settings of a decoder that tell how a depth is built."""


class TokenDepth(nnx.Module):
    """One depth: it combines hidden states with the embeddings of later tokens, and applies a layer.

    Attributes:
        hidden_norm: Norm of the hidden states.
        embedding_norm: Norm of the embeddings.
        projection: Maps [embedding, hidden state], [B, S, 2 D], to [B, S, D]. Published files have this order.
        layer: A layer of the model's kind.
        norm: Norm before the output layer.
    """

    def __init__(self, model: Any, decoder: Any, projection: Node[Any], rngs: nnx.Rngs):
        """Build a depth with the dtypes of `model`, from the config of its decoder."""
        width = decoder.hidden_dim
        norm = decoder.norm or RMSNorm.Config()
        layer = layer_configs(decoder.layer, decoder.num_layers)[-1]
        self.hidden_norm = model.child(norm, rngs=rngs, dim=width)
        self.embedding_norm = model.child(norm, rngs=rngs, dim=width)
        self.projection = model.child(
            projection, rngs=rngs, input_dims=(2 * width,), output_dims=(width,), axes=("mlp", "embed")
        )
        self.layer = model.child(layer, rngs=rngs, input_dim=width)
        self.norm = model.child(norm, rngs=rngs, dim=width)

    def combine(self, hidden: jax.Array, embeddings: jax.Array) -> jax.Array:
        """Return the input of the layer: two arrays [B, S, D] -> [B, S, D]."""
        joined = jnp.concatenate([self.embedding_norm(embeddings), self.hidden_norm(hidden)], axis=-1)
        return constrain(self.projection(joined), *RESIDUAL)


class MultiTokenCausalLM(CausalLM):
    """A causal language model that also learns to predict the tokens after the next one.

    The other methods compute what the model without the depths computes. The depths add `mtp_loss` to the training loss, and
    report the mean cross-entropy of each depth, such as `mtp_1_loss`.
    """

    @node
    class Config(CausalLM.Config, ExtraLossRole):
        """Settings for the depths.

        Attributes:
            depth: Number of tokens to predict after the next one.
            mtp_weight: Weight of the loss. The losses of the depths are averaged.
            projection: Combines a hidden state and an embedding; it is built once per depth.
        """

        depth: int = setting(default=1, ge=1, le=16)
        mtp_weight: float = setting(default=0.3, gt=0, kind="training")
        projection: Node[Projection] = Linear.Config()

        def validate(self) -> Iterable[Problem]:
            """Check that the decoder has the settings that the depths need."""
            yield from super().validate()
            missing = [name for name in NEEDED if name not in children(self.decoder)]
            if missing:
                yield Problem(
                    path="decoder",
                    message=f"multi-token prediction copies settings of the decoder, but the decoder has no {missing[0]!r}",
                    got=type(self.decoder).__qualname__,
                    expected=f"a decoder with {', '.join(NEEDED)}",
                    fix="remove the feature multi-token-prediction",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        if not isinstance(self.decoder, EmbedsTokens):
            raise RequestError(
                f"{type(self.decoder).__name__} has no method `embed`, so it cannot embed the tokens for multi-token prediction\n"
                "    fix: remove the feature multi-token-prediction, or add the method"
            )
        self.mtp = nnx.List([TokenDepth(self, cfg.decoder, cfg.projection, rngs) for _ in range(cfg.depth)])

    def losses(self, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
        """Add the losses of the depths to those of the model.

        As in the paper, each depth sums over the targets that it has and divides by the number of targets of the model. The sum
        of several microbatches is therefore the loss of the whole batch.
        """
        loss, report = super().losses(hidden, batch)
        total = report["weight"]
        divisor = jnp.where(total > 0, total, 1.0)
        mean = jnp.float32(0.0)
        for depth, (x, targets, weights) in enumerate(self.predictions(hidden, batch), start=1):
            op = CrossEntropyOp(x, self.decoder.head_weight(), targets, weights / divisor, self._options())
            value, _ = op.run(self.cfg.loss_kernel)
            mean += value / self.cfg.depth
            weight = jnp.sum(weights)
            entropy = value * divisor / jnp.where(weight > 0, weight, 1.0)
            summaries.add_summary(f"mtp_{depth}_loss", summaries.Summary(entropy, weight))
        summaries.add_loss("mtp_loss", self.cfg.mtp_weight * mean)
        return loss, report

    def predictions(self, hidden: jax.Array, batch: Batch) -> Iterable[tuple[jax.Array, jax.Array, jax.Array]]:
        """Yield the input of the output layer [B, S, D], the targets [B, S] and their weights [B, S] of each depth.

        A target has a weight only if it belongs to the document of its position.
        """
        context, embeddings, stack = batch_context(batch), self.embed(batch), self._stack()
        targets, weights = batch["targets"], batch.get("weights")
        weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
        x = hidden
        for depth, module in enumerate(self.mtp, start=1):
            has_target = self._has_later_token(targets.shape, context, depth)
            x = module.combine(x, jnp.where(has_target[..., None], shift(embeddings, depth), 0))
            # Positions without a later token are padding to the layer.
            real = has_target if context.real is None else has_target & shift(context.real, depth)
            with summaries.collect(module) as collected:
                x, _ = stack(nnx.List([module.layer]), x, dataclasses.replace(context, real=real, shared={}))
            for name, value in collected.summaries.items():
                summaries.add_summary(f"mtp_{depth}.{name}", value)
            for name, value in collected.losses.items():
                summaries.add_loss(name, value)
            yield module.norm(x), shift(targets, depth), jnp.where(has_target, shift(weights, depth), 0)

    def unstacked(self, *, heads: bool = False) -> "MultiTokenCausalLM":
        """Return this model in the form that decodes fastest, without its depths unless `heads` is set."""
        copy: Any = super().unstacked()
        if not heads:
            copy.mtp = nnx.List([])
        return copy

    def draft_cache_spec(self) -> tuple[Any, ...]:
        """Return the entries of the depths' caches; see `KeepsCache`."""
        return tuple(spec_of(module.layer) for module in self.mtp)

    def draft_from_cache(
        self, hidden: jax.Array, new: NewTokens, context: Context, cache: tuple[Any, ...], head: Any = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Draft one token with each depth; see `DraftsFromCache`.

        The depths see the tokens that follow a position, even if they are only drafts.
        """
        x, tokens, drafts, entries, stack = hidden, new.following, [], [], self._stack()
        for module, entry in zip(self.mtp, cache, strict=True):
            x = module.combine(x, self.embed({"tokens": tokens[:, None]}))
            x, (entry,) = stack(nnx.List([module.layer]), x, dataclasses.replace(context, shared={}), (entry,))
            logits = self.logits(module.norm(x[new.last]), head)[:, 0]
            drafts.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
            entries.append(entry)
            next_tokens = tokens.at[new.successors].get(mode="clip")
            tokens = jnp.where(new.successors < len(tokens), next_tokens, drafts[-1][new.requests])
        return jnp.stack(drafts, axis=1), tuple(entries)

    def _stack(self) -> Stack:
        """Return a stack that runs a layer with the remat policy of the decoder."""
        stack = self.cfg.decoder.stack
        remat: Any = children(stack)["remat"] if isinstance(stack, StackRole) else None
        return Stack(Stack.Config(mode="unrolled", remat=remat))

    @staticmethod
    def _has_later_token(shape: tuple[int, ...], context: Context, depth: int) -> jax.Array:
        """Return whether the token `depth` positions later is in the document of a position, bool [B, S].

        In a prefix that attends in both directions, only the last position has one: the others would see their targets.
        """
        places = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape)
        inside = places < shape[1] - depth
        if context.segment_ids is not None:
            inside &= (shift(context.segment_ids, depth) == context.segment_ids) & (context.segment_ids > 0)
        if context.prefix is not None:
            inside &= places >= context.prefix[:, None] - 1
        return inside


def shift(x: jax.Array, count: int) -> jax.Array:
    """Move entry i + count of each row to i, and append zeros: [B, S, ...] -> [B, S, ...]."""
    count = min(count, x.shape[1])
    return jnp.pad(x[:, count:], [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))
