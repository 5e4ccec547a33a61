"""The causal language model: a decoder, its output layer and its loss."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

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
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp, Options, logits_of
from axlearn_plugins_transformer.layer_roles import LanguageModelRole
from axlearn_plugins_transformer.transformer import Cache, Decoder


class DecoderModel(Protocol):
    """Token ids to hidden states. Built with `vocab_size`, `rngs`, `precision`."""

    def __call__(self, tokens: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """int32 [B, S] -> [B, S, D], and the new cache."""
        ...

    def head_weight(self) -> jax.Array:
        """[D, V]."""
        ...

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache."""
        ...

    def unstacked(self) -> Any:
        """The decoder in the form that decodes fastest."""
        ...


@runtime_checkable
class TwoPartDecoder(Protocol):
    """A `DecoderModel` that need not finish all tokens: `decoder(...)` is `finish` of what `begin` gives."""

    def begin(self, tokens: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """int32 [B, S], the tokens after those in the cache -> [B, S, D] for `finish`, and the new cache."""
        ...

    def finish(self, x: jax.Array) -> jax.Array:
        """Any tokens of what `begin` gives, [B, S, D] -> their hidden states [B, S, D]."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A model that gives the logits of chosen positions, so that those of a whole batch are never in memory together.

    Attributes:
        decoder: tokens -> hidden states.
    """

    decoder: Any

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V]."""
        ...


class CausalLM(Layer):
    """Predicts the next token."""

    @node
    class Config(Layer.Config["CausalLM"], LanguageModelRole):
        """The decoder, the dtypes and the loss.

        `param_dtype` is of the stored parameters, `dtype` of what the layers compute, `output_dtype` of the logits that
        calls return; the loss is always computed in float32. `z_loss` weighs log(Z)^2. `loss_chunk` is how many
        positions per row have their logits in memory at one time, None as many as take 256 MiB on a device: execution, as
        is the kernel, since the sum is the same.
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
            """Dtypes that do not exist or are not given."""
            yield from super().validate()
            for name in ("param_dtype", "dtype"):
                if getattr(self, name) is None:
                    yield Problem(
                        path=name, message="the root of the model has no parent to take it from", fix="set it"
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
        """Logits of the next token at every position.

        Args:
            tokens: int32 [B, S]; with a cache, those that follow what is in it.
            positions: int32 [B or 1, S], position within the document; None counts from the start.
            segment_ids: int32 [B, S], equal within a document; None means that each row is one.
            cache: from `init_cache` or an earlier call.

        Returns:
            [B, S, V] in `output_dtype`; with a cache, a pair of that and the new cache.
        """
        x, new = self.decoder(tokens, Context(positions=positions, segment_ids=segment_ids), cache)
        logits = self.logits(x)
        return logits if cache is None else (logits, new)

    def logits(self, hidden: jax.Array, head: Any = None) -> jax.Array:
        """[B, S, D] from the decoder -> [B, S, V] in `output_dtype`.

        `head`: what `decoder.head_weight()` gave earlier, in a layout that is read faster.
        """
        head = self.decoder.head_weight() if head is None else head
        return logits_of(hidden, head, self._options()).astype(self.cfg.output_dtype)

    def _options(self, z_loss: float = 0.0) -> Options:
        cfg = self.cfg
        return Options(self.precision.compute, cfg.loss_chunk, cfg.logit_softcap, z_loss, _constrain_logits)

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """The mean cross-entropy of the targets, in nats, plus z-loss and the auxiliary losses of the layers.

        Args:
            batch: see `contracts.parts.Batch`. `weights`, `segment_ids` and `positions` may be left out or None.
                `prefix` (int32 [B]), where given, is how many leading tokens of each row see one another.

        Returns:
            (loss, summaries): `weight` is the number of targets, `cross_entropy` the loss without what is added to it
            (if anything is), in addition to `z_loss`, each auxiliary loss and what the layers report. While held-out data is
            measured, nothing is added.
        """
        arrays = {k: v for k, v in batch.items() if v is not None}
        z_loss = 0.0 if summaries.is_held_out() else self.cfg.z_loss
        with summaries.collect() as collector:
            hidden, _ = self.decoder(arrays["tokens"], batch_context(arrays))
        if "weights" in arrays:
            weight = jnp.sum(arrays["weights"])
            weights = arrays["weights"] / jnp.where(weight > 0, weight, 1.0)
        else:
            size = arrays["targets"].size
            weight, weights = jnp.float32(size), jnp.full(arrays["targets"].shape, 1 / size, jnp.float32)
        op = CrossEntropyOp(hidden, self.decoder.head_weight(), arrays["targets"], weights, self._options(z_loss))
        loss, entropy = op.run(self.cfg.loss_kernel)
        report = {"weight": weight, **collector.summaries, **collector.losses}
        if z_loss:
            report["z_loss"] = loss - entropy
        if z_loss or collector.losses:
            report["cross_entropy"] = entropy
        for value in collector.losses.values():
            loss = loss + value
        return loss, report

    def held_out_loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """The mean cross-entropy of the targets, in nats, also for a subclass whose `loss` adds to it."""
        with summaries.held_out():
            return CausalLM.loss(self, batch)

    def functions(self) -> Mapping[str, Function]:
        """`score`, `unstack`, `prefill` and `decode`; see `axlearn_plugins_transformer.functions`."""
        from axlearn_plugins_transformer.functions import language_model_functions

        return language_model_functions(self)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> Iterator[int]:
        """The tokens that follow a prompt, one at a time; the options are those of `generate.generate`."""
        from axlearn_plugins_transformer.generate import generate

        return generate(self, prompt_ids, **options)

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of at most `length` tokens."""
        return self.decoder.init_cache(batch, length)

    def unstacked(self) -> "CausalLM":
        """This model in the form that decodes fastest; not for training."""
        copy = nnx.merge(*nnx.split(self))
        copy.decoder = self.decoder.unstacked()
        return copy


def batch_context(batch: Batch) -> Context:
    """The context that layers get for the rows of a batch. Entries of `contracts.parts.Batch` may be left out."""
    arrays = {k: batch.get(k) for k in ("positions", "segment_ids", "prefix")}
    weights = batch.get("weights")
    real = None if arrays["segment_ids"] is not None or weights is None else padding.up_to_the_last_target(weights)
    return Context(**arrays, real=real)


def _constrain_logits(logits: jax.Array) -> jax.Array:
    return constrain(logits, "batch", "sequence", "activation_vocab")


def num_params(cfg: Node[Any]) -> int:
    """How many numbers a model of this config holds; builds it abstractly, which allocates nothing."""
    state = nnx.state(nnx.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))), nnx.Param)
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state))
