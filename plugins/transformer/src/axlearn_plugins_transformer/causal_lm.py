"""The causal language model: a decoder, an output layer and a loss."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.compose import Function
from axlearn_core.config import REQUIRED, Node, node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_core.errors import Problem
from axlearn_core.nn import padding, summaries
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp, Options, compute_logits
from axlearn_plugins_transformer.layer_roles import LanguageModelRole
from axlearn_plugins_transformer.transformer import Cache, Decoder

FACTS = ("positions", "segment_ids", "prefix")
"""Entries of a batch that describe its tokens."""
TEXT_ENTRIES = frozenset({"tokens", "targets", "weights", *FACTS})
"""Entries of a batch of text. All others are extras."""
LAYER_ENTRIES = "layers."
"""Start of the names of a batch's entries that are inputs of the layers."""


class DecoderModel(Protocol):
    """Maps token ids to hidden states.

    It is built with `vocab_size`, `rngs` and `precision`.
    """

    def __call__(self, tokens: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Return the hidden states, int32 [B, S] -> [B, S, D], and the new cache."""
        ...

    def head_weight(self) -> jax.Array:
        """Return the output weight, [D, V]."""
        ...

    def cache_spec(self) -> tuple[Any, ...]:
        """Return the entries of each layer's cache; see `KeepsCache`."""
        ...

    def unstacked(self) -> Any:
        """Return the decoder in the form that decodes fastest."""
        ...


@runtime_checkable
class EmbedsTokens(Protocol):
    """A `DecoderModel` that accepts embeddings in `__call__` and `begin`, as the argument `embeddings`."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed the tokens: int32 [B, S] -> [B, S, D]."""
        ...


@runtime_checkable
class SplitDecoder(Protocol):
    """A `DecoderModel` that can skip the end of the computation for some tokens.

    It computes `finish(begin(...))`.
    """

    def begin(self, tokens: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Process tokens that follow those in the cache: int32 [B, S] -> [B, S, D].

        Returns the input of `finish`, and the new cache.
        """
        ...

    def finish(self, x: jax.Array) -> jax.Array:
        """Compute the hidden states from any outputs of `begin`: [B, S, D] -> [B, S, D]."""
        ...


@runtime_checkable
class DraftsTokens(Protocol):
    """A model with heads that draft tokens, for speculative decoding.

    Examples are the heads of Gloeckle et al., 2024, and of Medusa (Cai et al., 2024).
    """

    def draft(self, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """Draft the tokens that follow chosen tokens.

        Args:
            hidden: Hidden states from which the tokens were chosen, [R, 1, D].
            tokens: Chosen tokens, int32 [R].

        Returns:
            Tokens that may follow, int32 [R, K].
        """
        ...


class NewTokens(NamedTuple):
    """New tokens of requests, and what follows them.

    T tokens belong to R requests. The tokens of a request are consecutive.

    Attributes:
        following: Token after each token, int32 [T].
        successors: Index of the token after each token, int32 [T]. T if it is not one of them.
        requests: Request of each token, int32 [T].
        last: Index of the token after which each request continues, int32 [R].
    """

    following: jax.Array
    successors: jax.Array
    requests: jax.Array
    last: jax.Array


@runtime_checkable
class DraftsFromCache(Protocol):
    """A model with heads that draft tokens and keep a cache, such as those of `MultiTokenCausalLM`.

    A server adds the entries of the heads to its cache, and runs the heads on all new tokens.
    """

    def unstacked(self, *, heads: bool = False) -> Any:
        """Return the model in the form that decodes fastest, with its heads if `heads` is set."""
        ...

    def draft_cache_spec(self) -> tuple[Any, ...]:
        """Return the entries of the heads' caches; see `KeepsCache`."""
        ...

    def draft_from_cache(
        self, hidden: jax.Array, new: NewTokens, context: Context, cache: tuple[Any, ...], head: Any = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Draft the tokens that follow the next token of each request.

        Args:
            hidden: Hidden states of T new tokens, [T, 1, D].
            new: What follows the tokens.
            context: Context with which the decoder computed the hidden states.
            cache: Caches of the heads.
            head: See `CausalLM.logits`.

        Returns:
            Tokens that may follow, int32 [R, K], and the new caches.
        """
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A model that computes the logits of selected positions.

    The logits of a whole batch need not fit in memory.

    Attributes:
        decoder: Maps tokens to hidden states.
    """

    decoder: Any

    def hidden_states(self, batch: Batch, context: Context | None = None, cache: Any = None) -> tuple[jax.Array, Any]:
        """Return the hidden states of a batch, [B, S, D], and the new cache."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Compute the logits: [..., D] -> [..., V]."""
        ...


class CausalLM(Layer):
    """A causal language model, which predicts the next token."""

    @node
    class Config(Layer.Config["CausalLM"], LanguageModelRole):
        """Settings for the decoder, the dtypes and the loss.

        Attributes:
            vocab_size: Size of the vocabulary.
            decoder: Maps token ids to hidden states.
            param_dtype: Dtype of the stored parameters.
            dtype: Dtype in which the layers compute.
            output_dtype: Dtype of the returned logits. The loss is always computed in float32.
            logit_softcap: Soft cap on the logits, or None.
            z_loss: Weight of log(Z)^2.
            loss_chunk: Positions per row whose logits are in memory at a time. None fits them into 256 MiB per device.
            loss_kernel: Implementation of the `cross_entropy` op. None selects the best one.
        """

        vocab_size: int = setting(default=REQUIRED, ge=1, le=2**24)
        decoder: Node[DecoderModel] = Decoder.Config()
        param_dtype: str | None = setting(default="float32", kind="precision")
        dtype: str | None = setting(default="float32", kind="precision")
        output_dtype: str = setting(default="float32", kind="precision")
        logit_softcap: float | None = setting(default=None, gt=0)
        z_loss: float = setting(default=0.0, ge=0, kind="training")
        loss_chunk: int | None = setting(default=None, kind="execution", ge=1)
        loss_kernel: str | None = setting(default=None, kind="execution")

        def validate(self) -> Iterable[Problem]:
            """Check the dtypes."""
            yield from super().validate()
            for name in ("param_dtype", "dtype"):
                if getattr(self, name) is None:
                    yield Problem(
                        path=name, message="must be set, because the root of the model has no parent", fix="set it"
                    )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, precision=Precision())
        self.vocab_size = cfg.vocab_size
        self.end_tokens: tuple[int, ...] = ()
        self.decoder = self.child(cfg.decoder, rngs=rngs, vocab_size=cfg.vocab_size)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Compute the logits of the next token at every position.

        Args:
            tokens: int32 [B, S]. With a cache, these follow the cached tokens.
            positions: Position within the document, int32 [B or 1, S]. None counts from the start of the row.
            segment_ids: int32 [B, S], equal within a document. None treats each row as one document.
            cache: Cache from `init_cache` or an earlier call.

        Returns:
            Logits [B, S, V] in `output_dtype`. With a cache, the pair (logits, new cache).
        """
        x, new = self.hidden_states({"tokens": tokens}, Context(positions=positions, segment_ids=segment_ids), cache)
        logits = self.logits(x)
        return logits if cache is None else (logits, new)

    def embed(self, inputs: Batch) -> jax.Array:
        """Return the embeddings of the tokens, [B, S, D]: the input of the first layer.

        A subclass may add other inputs, such as projected image features, at the positions of their tokens.

        Args:
            inputs: `tokens`, int32 [B, S], and what else the batch contains, [B, ...] each. Decoding steps offer only `tokens`. A
                server offers the extras of a request once, with the whole prompt and padding. The embedding of a token must not
                depend on later tokens, as in any causal model.
        """
        return self.decoder.embed(inputs["tokens"])

    def hidden_states(self, batch: Batch, context: Context | None = None, cache: Any = None) -> tuple[jax.Array, Any]:
        """Return the hidden states of a batch, [B, S, D], and the new cache.

        Training, objectives, scoring, generation and serving call this method or `decoder_inputs`.

        Args:
            batch: See `loss`. Only `tokens` is required.
            context: Context of the layers (default: `batch_context(batch)`).
            cache: Cache from `init_cache` or an earlier call, or None.
        """
        tokens, context, options = self.decoder_inputs(batch, context)
        return self.decoder(tokens, context, cache, **options)

    def decoder_inputs(self, batch: Batch, context: Context | None = None) -> tuple[jax.Array, Context, dict[str, Any]]:
        """Return the tokens, the context and the other arguments with which the decoder runs on a batch."""
        context = batch_context(batch) if context is None else context
        options = {"embeddings": self.embed(batch)} if isinstance(self.decoder, EmbedsTokens) else {}
        return batch["tokens"], context, options

    def logits(self, hidden: jax.Array, head: Any = None) -> jax.Array:
        """Compute the logits of hidden states: [B, S, D] -> [B, S, V] in `output_dtype`.

        Args:
            hidden: Output of the decoder, [B, S, D].
            head: Result of an earlier `decoder.head_weight()`, possibly in a faster layout. None calls it.
        """
        head = self.decoder.head_weight() if head is None else head
        return compute_logits(hidden, head, self._options()).astype(self.cfg.output_dtype)

    def _options(self, z_loss: float = 0.0) -> Options:
        cfg = self.cfg
        return Options(self.precision.compute, cfg.loss_chunk, cfg.logit_softcap, z_loss, _constrain_logits)

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Compute the training loss: mean cross-entropy in nats, plus auxiliary losses.

        The auxiliary losses are the z-loss and those of the layers.

        Args:
            batch: See `contracts.parts.Batch`. `weights`, `segment_ids` and `positions` may be missing or None.
                `prefix` (int32 [B]), if given, is the number of leading tokens of each row that attend to one another.

        Returns:
            (loss, summaries). `weight` is the number of targets. If other terms are added to the loss, `cross_entropy`
            is the loss without them. The other summaries are `z_loss`, each auxiliary loss and the summaries of the
            layers. Evaluation on held-out data adds no other terms.
        """
        arrays = {k: v for k, v in batch.items() if v is not None}
        with summaries.collect() as collector:
            hidden, _ = self.hidden_states(arrays)
            loss, report = self.losses(hidden, arrays)
        if collector.losses:
            report = {"cross_entropy": loss, **report}
        report = {**report, **collector.summaries, **collector.losses}
        for value in collector.losses.values():
            loss = loss + value
        return loss, report

    def losses(self, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
        """Compute the losses of the hidden states of a batch: the mean cross-entropy in nats, plus the z-loss.

        A subclass may add losses, such as the prediction of several tokens, with `summaries.add_loss`.

        Args:
            hidden: Result of `hidden_states`, [B, S, D].
            batch: See `loss`.

        Returns:
            (loss, summaries): `weight` is the number of targets. With a z-loss, `z_loss` and `cross_entropy` are its parts.
        """
        z_loss = 0.0 if summaries.is_held_out() else self.cfg.z_loss
        targets, weights = batch["targets"], batch.get("weights")
        if weights is None:
            weight, weights = jnp.float32(targets.size), jnp.full(targets.shape, 1 / targets.size, jnp.float32)
        else:
            weight = jnp.sum(weights)
            weights = weights / jnp.where(weight > 0, weight, 1.0)
        op = CrossEntropyOp(hidden, self.decoder.head_weight(), targets, weights, self._options(z_loss))
        loss, entropy = op.run(self.cfg.loss_kernel)
        return loss, {"weight": weight, **({"z_loss": loss - entropy, "cross_entropy": entropy} if z_loss else {})}

    def held_out_loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Compute the mean cross-entropy of the targets, in nats.

        A subclass may add terms to `loss`, but not to this loss.
        """
        with summaries.held_out():
            return CausalLM.loss(self, batch)

    def functions(self) -> Mapping[str, Function]:
        """Return `score`, `unstack`, `prefill` and `decode`.

        See `axlearn_plugins_transformer.functions`.
        """
        from axlearn_plugins_transformer.functions import language_model_functions

        return language_model_functions(self)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> Iterator[int]:
        """Yield the tokens that follow a prompt. See `generate.generate` for the options."""
        from axlearn_plugins_transformer.generate import generate

        return generate(self, prompt_ids, **options)

    def init_cache(self, batch: int, length: int) -> Any:
        """Return an empty cache for `batch` rows of at most `length` tokens."""
        return Cache.empty(self.cache_spec(), batch, length)

    def cache_spec(self) -> tuple[Any, ...]:
        """Return the entries of each layer's cache; see `KeepsCache`."""
        return self.decoder.cache_spec()

    def unstacked(self) -> "CausalLM":
        """Return this model in the form that decodes fastest. It is not for training."""
        copy = nnx.merge(*nnx.split(self))
        copy.decoder = self.decoder.unstacked()
        return copy


def splits_decoder(model: Any) -> bool:
    """Return True if the decoder computes all of `model.hidden_states` and can skip the end of it; see `SplitDecoder`."""
    is_plain = isinstance(model, CausalLM) and type(model).hidden_states is CausalLM.hidden_states
    return is_plain and isinstance(model.decoder, SplitDecoder)


def batch_context(batch: Batch) -> Context:
    """Return the context that the layers need for a batch.

    The batch may lack entries of `contracts.parts.Batch`. Entries whose names start with `LAYER_ENTRIES`, [B, S, L, ...] for L
    layers, become the inputs of the layers.
    """
    positions, segment_ids, prefix = (batch.get(name) for name in FACTS)
    weights = batch.get("weights")
    real = None if segment_ids is not None or weights is None else padding.make_token_mask(weights)
    extras = {k: v for k, v in batch.items() if k not in TEXT_ENTRIES and v is not None}
    names = [name for name in extras if name.startswith(LAYER_ENTRIES)]
    inputs = {name.removeprefix(LAYER_ENTRIES): jnp.moveaxis(extras.pop(name), 2, 1) for name in names}
    return Context(
        positions=positions, segment_ids=segment_ids, prefix=prefix, real=real, extras=extras, layer_inputs=inputs
    )


def _constrain_logits(logits: jax.Array) -> jax.Array:
    return constrain(logits, "batch", "sequence", "activation_vocab")


def num_params(cfg: Node[Any]) -> int:
    """Return the number of parameters in a model.

    The model is built abstractly, without allocating memory.
    """
    state = nnx.state(nnx.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))), nnx.Param)
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state))
