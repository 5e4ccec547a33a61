"""The Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929): images as sequences of patches.

B images of E x E pixels with C channels, patches of P x P pixels, S = (E / P)^2 patches and a class token, D width, K
classes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, factor_of, interface, node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_core.errors import Problem, RequestError
from axlearn_core.nn import padding, summaries
from axlearn_core.nn.initializers import Constant, Initializer, Normal
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.feed_forward import PlainFeedForward
from axlearn_plugins_transformer.layer_roles import WidthRole
from axlearn_plugins_transformer.norm import LayerNorm, Norm
from axlearn_plugins_transformer.stack import LayerStack, Stack, StackLayer
from axlearn_plugins_transformer.transformer import RESIDUAL, TransformerLayer

BIASED = Linear.Config(bias=True)


class ImageEmbedding(Protocol):
    """Embeds images as sequences of vectors. Built with `dim`, `rngs`, `precision`."""

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map float [B, E, E, C] to [B, 1 + S, D], with the class token first."""
        ...


class PatchEmbedding(Layer):
    """Linear projection of patches, with a learned class token and learned positions."""

    @node
    class Config(Layer.Config["PatchEmbedding"]):
        """`image_size` and `patch_size` are edge lengths in pixels; `channels` is the number of values per pixel."""

        dim: int = interface(default=REQUIRED)
        image_size: int = setting(default=REQUIRED, ge=1)
        patch_size: int = setting(default=REQUIRED, ge=1)
        channels: int = setting(default=3, ge=1)
        projection: Node[Projection] = BIASED
        init: Node[Initializer] = setting(default=Normal(stddev=0.02), kind="training")

        def validate(self) -> Iterable[Problem]:
            """Yield a problem if the image size is not a multiple of the patch size."""
            yield from super().validate()
            if (
                isinstance(self.image_size, int)
                and isinstance(self.patch_size, int)
                and self.image_size % self.patch_size
            ):
                divisors = [str(n) for n in range(1, self.image_size + 1) if self.image_size % n == 0]
                yield Problem(
                    path="patch_size",
                    message="does not divide image_size",
                    got=f"{self.patch_size} of {self.image_size}",
                    expected=f"one of {', '.join(divisors)}",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        size, width = cfg.patch_size, (cfg.dim,)
        pixels = (size, size, cfg.channels)
        # The axes of a patch are short, so they are replicated.
        axes = ("rank", "rank", "rank", "embed")
        self.projection = self.child(cfg.projection, rngs=rngs, input_dims=pixels, output_dims=width, axes=axes)
        count = 1 + (cfg.image_size // size) ** 2
        self.token = self.parameter(rngs, Constant(), (1, 1, cfg.dim), (None, None, "embed"))
        self.position = self.parameter(rngs, cfg.init, (1, count, cfg.dim), (None, "rank", "embed"))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map float [B, E, E, C] to [B, 1 + S, D]. Raise `RequestError` if the images have a different size."""
        cfg = self.cfg
        batch, edge = images.shape[0], cfg.image_size
        if images.shape[1:] != (edge, edge, cfg.channels):
            raise RequestError(
                f"patch-embedding: images of the wrong size\n    got: {list(images.shape[1:])}\n"
                f"    expected: {[edge, edge, cfg.channels]}\n    fix: set the same image_size and channels in input and model"
            )
        count, size = edge // cfg.patch_size, cfg.patch_size
        patches = images.reshape(batch, count, size, count, size, cfg.channels).transpose(0, 1, 3, 2, 4, 5)
        x = self.projection(patches.reshape(batch, count * count, size, size, cfg.channels))
        token = jnp.broadcast_to(self.computed(self.token), (batch, 1, cfg.dim))
        return jnp.concatenate([token, x], axis=1) + self.computed(self.position)


class ImageEncoder(Layer):
    """Image encoder: an embedding, a stack of layers with attention over the whole image, and a final norm."""

    @node
    class Config(Layer.Config["ImageEncoder"]):
        """The defaults are the layers of the paper: pre-norm, biases everywhere, GELU."""

        dim: int = interface(default=REQUIRED)
        num_layers: int = setting(default=REQUIRED, ge=1, le=2**16)
        embedding: Node[ImageEmbedding] = PatchEmbedding.Config()
        layer: Node[StackLayer] = TransformerLayer.Config(
            attention=Attention.Config(causal=False, query=BIASED, key=BIASED, value=BIASED, output=BIASED),
            feed_forward=PlainFeedForward.Config(up=BIASED, down=BIASED),
            norm=LayerNorm.Config(eps=1e-6),
        )
        stack: Node[LayerStack] = Stack.Config()
        norm: Node[Norm] | None = LayerNorm.Config(eps=1e-6)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width = cfg.dim
        self.embedding = self.child(cfg.embedding, rngs=rngs, dim=width)

        def make(layer: Node[StackLayer], rngs: nnx.Rngs) -> StackLayer:
            return self.child(layer, rngs=rngs, input_dim=width)

        self.layer = cfg.stack.build().init(make, cfg.layer, cfg.num_layers, rngs)
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=width)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map float [B, E, E, C] to [B, 1 + S, D]."""
        x = constrain(self.embedding(images), *RESIDUAL)
        # Images of weight 0 pad a batch, so all of their positions are padding.
        x, _ = self.cfg.stack.build()(self.layer, x, Context(real=padding.tokens(*x.shape[:2])))
        return x if self.cfg.norm is None else self.norm(x)


class ImageEncoderModel(Protocol):
    """Encoder from images to hidden states. Built with `dim`, `rngs`, `precision`."""

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map float [B, E, E, C] to [B, 1 + S, D]; the first vector represents the whole image."""
        ...


class ImageClassifier(Layer):
    """Classifies images with an encoder, a pooled vector and a linear head."""

    @node
    class Config(Layer.Config["ImageClassifier"], WidthRole):
        """`hidden_dim` is the width. `pool` selects the class token, or the mean over the patches. `label_smoothing` is the
        probability that is spread over all classes. `output_multiplier` is a factor of the head's input, or a node that builds one
        from the width."""

        num_classes: int = setting(default=REQUIRED, ge=2)
        hidden_dim: int = setting(default=REQUIRED, ge=1, le=2**24)
        encoder: Node[ImageEncoderModel] = ImageEncoder.Config()
        head: Node[Projection] = BIASED
        pool: Literal["token", "mean"] = "token"
        label_smoothing: float = setting(default=0.0, ge=0, lt=1)
        output_multiplier: float | Node[float] = setting(default=1.0, gt=0, hide_default=True)
        param_dtype: str | None = setting(default="float32", kind="precision")
        dtype: str | None = setting(default="float32", kind="precision")
        output_dtype: str = setting(default="float32", kind="precision")

        def validate(self) -> Iterable[Problem]:
            """Yield a problem for each dtype that is unknown or not set."""
            yield from super().validate()
            for name, dtype in (("param_dtype", self.param_dtype), ("dtype", self.dtype)):
                if dtype is None:
                    yield Problem(
                        path=name, message="the root of the model has no parent to inherit it from", fix="set it"
                    )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, precision=Precision())
        self.encoder = self.child(cfg.encoder, rngs=rngs, dim=cfg.hidden_dim)
        dims = {"input_dims": (cfg.hidden_dim,), "output_dims": (cfg.num_classes,)}
        self.head = self.child(cfg.head, rngs=rngs, axes=("embed", "vocab"), **dims)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map float [B, E, E, C] to logits [B, K] in `output_dtype`."""
        x = self.encoder(images.astype(self.precision.compute))
        x = x[:, 0] if self.cfg.pool == "token" else jnp.mean(x[:, 1:], axis=1)
        scale = factor_of(self.cfg.output_multiplier, width=self.cfg.hidden_dim)
        return self.head(x if scale == 1 else x * scale).astype(self.cfg.output_dtype)

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the mean cross-entropy of the smoothed labels, in nats, plus the auxiliary losses of the layers.

        Args:
            batch: `images` float [B, E, E, C]; `labels` int32 [B], below K (the loss is NaN otherwise); optional `weights`
                float32 [B], 0 for padding.

        Returns:
            (loss, summaries): `weight` is the number of images, and `accuracy` the fraction whose most likely class is the
            label. `cross_entropy` is that of the unsmoothed labels, and is present only if the loss differs from it. On
            held-out data, labels are not smoothed.
        """
        labels, weights = batch["labels"], batch.get("weights")
        rows = Context(real=None if weights is None else weights[:, None] > 0)
        with summaries.collect() as collector, padding.use_context(rows):
            logits = self(batch["images"]).astype(jnp.float32)
        logits = constrain(logits, "batch", "activation_vocab")
        weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
        weight = jnp.sum(weights)
        share = weights / jnp.where(weight > 0, weight, 1.0)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        label_log_p = jnp.take_along_axis(log_p, labels[:, None], axis=1, mode="fill", fill_value=jnp.nan)[:, 0]
        smooth = 0.0 if summaries.is_held_out() else self.cfg.label_smoothing
        smoothed = -((1 - smooth) * label_log_p + smooth * jnp.mean(log_p, axis=-1) if smooth else label_log_p)
        loss = jnp.sum(smoothed * share)
        accuracy = jnp.sum((jnp.argmax(logits, axis=-1) == labels) * share)
        report = {"weight": weight, "accuracy": accuracy, **collector.summaries, **collector.losses}
        if smooth or collector.losses:
            report["cross_entropy"] = -jnp.sum(label_log_p * share)
        for value in collector.losses.values():
            loss = loss + value
        return loss, report

    def held_out_loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the mean cross-entropy of the labels, in nats. Terms that a subclass adds to `loss` are ignored."""
        with summaries.held_out():
            return ImageClassifier.loss(self, batch)
