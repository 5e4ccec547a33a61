"""Alternating updates (AltUp; Baykal et al., 2023, arXiv 2301.13310) and learned augmented residuals (LAuReL), as in Gemma 3n.

The residual stream has N vectors per position. Each layer computes one of them, the active one, and predicts and corrects the
others with small matrices that depend on the token. The decoder passes the active vector from layer to layer, and the layers share
the others.

Legend: B rows, S positions, D width, N streams, R rank.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, find, interface, node, setting
from axlearn_core.errors import ConfigError, Problem, RequestError
from axlearn_core.nn.initializers import Constant, Initializer, Normal
from axlearn_core.nn.layer import Context, Layer, Precision, expand_to
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.norm import Norm, RMSNorm
from axlearn_plugins_transformer.per_layer import PerLayerGate
from axlearn_plugins_transformer.stack import StackLayer
from axlearn_plugins_transformer.transformer import RESIDUAL, Decoder, TransformerLayer

STREAMS = "altup_streams"
"""Name of the other streams in `Context.shared`, [N - 1, B, S, D]."""
SMALLEST = 1e-5
"""Lower bound on the mean square of a vector that is scaled to the magnitude of another one."""


class Laurel(Layer):
    """A low-rank residual of a layer's normalized input (LAuReL; Menghani et al., 2024, arXiv 2411.07501).

    It computes `x + norm(right(left(x)))`.
    """

    @node
    class Config(Layer.Config["Laurel"]):
        """Settings for the residual.

        Attributes:
            rank: R.
            left: Projection from D to R.
            right: Projection from R to D.
            norm: Norm of the result of `right`.
        """

        input_dim: int = interface(default=REQUIRED)
        rank: int = setting(default=64, ge=1)
        left: Node[Projection] = Linear.Config()
        right: Node[Projection] = Linear.Config()
        norm: Node[Norm] = RMSNorm.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, rank = (cfg.input_dim,), (cfg.rank,)
        self.left = self.child(cfg.left, rngs=rngs, input_dims=width, output_dims=rank, axes=("embed", "rank"))
        self.right = self.child(cfg.right, rngs=rngs, input_dims=rank, output_dims=width, axes=("rank", "embed"))
        self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the residual: [B, S, D] -> [B, S, D]."""
        return x + self.norm(self.right(self.left(x)))


class AltUp(Layer):
    """Predicts all streams before a layer, and corrects them with the layer's output."""

    @node
    class Config(Layer.Config["AltUp"]):
        """Settings for the updates.

        Attributes:
            num_streams: N. The first stream is the active one.
            coefficient_clip: Bound on the magnitude of the weights of the coefficients, or None.
            norm: Norm of the input of the router.
            router: Projection from D to N, whose tanh determines the coefficients.
            init: Initializer of the weights of the coefficients.
        """

        input_dim: int = interface(default=REQUIRED)
        num_streams: int = setting(default=4, ge=2)
        coefficient_clip: float | None = setting(default=120.0, gt=0)
        norm: Node[Norm] = RMSNorm.Config()
        router: Node[Projection] = Linear.Config()
        init: Node[Initializer] = Normal(stddev=0.02)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        count, sizes = cfg.num_streams, {"input_dims": (cfg.input_dim,), "output_dims": (cfg.num_streams,)}
        self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)
        self.router = self.child(cfg.router, rngs=rngs, **sizes, axes=("embed", "rank"))
        self.prediction = self.parameter(rngs, cfg.init, (count, count, count), ("rank", "rank", "rank"))
        self.correction = self.parameter(rngs, cfg.init, (count, count), ("rank", "rank"))

    def predict(self, streams: jax.Array) -> jax.Array:
        """Predict the streams after a layer, before the layer runs: [N, B, S, D] -> [N, B, S, D]."""
        coefficients = jnp.einsum("bsm,mji->bsji", self._route(streams[0]), self._weights(self.prediction))
        return constrain(streams + jnp.einsum("bsji,ibsd->jbsd", coefficients, streams), None, *RESIDUAL)

    def correct(self, predictions: jax.Array, output: jax.Array) -> jax.Array:
        """Correct predictions [N, B, S, D] with the output of the layer for the active stream, [B, S, D]."""
        coefficients = jnp.einsum("bsm,mj->jbs", self._route(output), self._weights(self.correction)) + 1
        change = jnp.einsum("jbs,bsd->jbsd", coefficients, output - predictions[0])
        return constrain(predictions + change, None, *RESIDUAL)

    def _route(self, x: jax.Array) -> jax.Array:
        """Return the inputs of the coefficients: [B, S, D] -> [B, S, N]."""
        routed = self.router(self.norm(x) * self.cfg.input_dim**-1.0)
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def _weights(self, parameter: nnx.Param[jax.Array]) -> jax.Array:
        weights, bound = self.computed(parameter), self.cfg.coefficient_clip
        return weights if bound is None else jnp.clip(weights, -bound, bound)


class AltUpLayer(TransformerLayer):
    """A transformer layer for the active stream, with a prediction before it and a correction of all streams after it.

    It needs an `altup-decoder`.
    """

    @node
    class Config(TransformerLayer.Config):
        """Settings for the layer.

        Attributes:
            altup: Predicts and corrects the streams.
            laurel: Residual next to attention. Its sum with attention's residual is divided by the square root of 2. None leaves it
                out.
            per_layer_gate: Adds per-layer inputs to the other streams, or None. It reads the active stream.
            gate_scale: Multiply the input of `per_layer_gate` by a trained vector, which is 1 in new models.
        """

        altup: Node[AltUp] = AltUp.Config()
        laurel: Node[Laurel] | None = Laurel.Config()
        per_layer_gate: Node[PerLayerGate] | None = None
        gate_scale: bool = True

        def validate(self) -> Iterable[Problem]:
            """Check that the layer has attention."""
            yield from super().validate()
            if self.attention is None:
                yield Problem(path="attention", message="altup-layer requires attention", fix="set attention")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.altup = self.child(cfg.altup, rngs=rngs, input_dim=cfg.input_dim)
        if cfg.laurel is not None:
            self.laurel = self.child(cfg.laurel, rngs=rngs, input_dim=cfg.input_dim)
        if cfg.per_layer_gate is not None:
            self.per_layer_gate = self.child(cfg.per_layer_gate, rngs=rngs, input_dim=cfg.input_dim)
            if cfg.gate_scale:
                self.gate_scale = self.parameter(rngs, Constant(value=1.0), (cfg.input_dim,), ("norm",))

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer to the active stream: [B, S, D] and its cache -> ([B, S, D], new cache).

        Raises:
            RequestError: The decoder, or the pipeline that runs the layer, passes no other streams.
        """
        if STREAMS not in context.shared:
            raise RequestError(
                "an altup-layer needs the streams of an altup-decoder\n    got: no other streams\n"
                "    fix: set model.decoder.type=altup-decoder; pipelines cannot run it"
            )
        predictions = self.altup.predict(jnp.concatenate([x[None], context.read_shared(STREAMS)]))
        x = predictions[0]
        normed = self._pre_norm("attention", x)
        y, cache = self.attention(normed, context, cache)
        x = self._add_residual("attention", x, y)
        if self.cfg.laurel is not None:
            x = (x + self.laurel(normed)) * 0.5**0.5
        corrected = self.altup.correct(predictions, self.feed_forward_half(x))
        x, others = corrected[0], corrected[1:]
        if self.cfg.per_layer_gate is not None:
            scaled = x * expand_to(self.computed(self.gate_scale), x.ndim) if self.cfg.gate_scale else x
            others = others + self.per_layer_gate(scaled, context.layer_inputs)[None]
        context.share(STREAMS, others)
        return x, cache


class AltUpDecoder(Decoder):
    """A decoder whose layers are `altup-layer`.

    The first stream is the embedding, and the others are projections of it. The hidden states are the mean of the first stream and
    of projections of the others. Each projection is scaled to the magnitude of the first stream.
    """

    @node
    class Config(Decoder.Config):
        """Settings for the decoder.

        Attributes:
            layer: Config of the layers.
            expand: Projection of the embedding to another stream; it is built once for each of them.
            merge: Projection of another stream before the mean; it is built once for each of them.
        """

        layer: Node[StackLayer] = AltUpLayer.Config()
        expand: Node[Projection] = Linear.Config()
        merge: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        counts = {altup.num_streams for altup in find(cfg.layer, AltUp.Config).values()}
        if len(counts) != 1:
            raise ConfigError(
                Problem(
                    path="model.decoder.layer",
                    message="an altup-decoder needs layers with the same number of streams",
                    got=", ".join(map(str, sorted(counts))) or "no altup-layer",
                    fix="set model.decoder.layer.type=altup-layer",
                )
            )
        others, width = range(counts.pop() - 1), (cfg.hidden_dim,)
        sizes = {"input_dims": width, "output_dims": width, "axes": ("embed", "mlp")}
        self.expand = nnx.List([self.child(cfg.expand, rngs=rngs, **sizes) for _ in others])
        self.merge = nnx.List([self.child(cfg.merge, rngs=rngs, **sizes) for _ in others])

    def _run_layers(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Project the embedding to the other streams, run the layers, and merge the streams; see `Decoder`."""
        streams = jnp.stack([project(x) for project in self.expand])
        context.share(STREAMS, constrain(_match_magnitude(streams, x), None, *RESIDUAL))
        x, cache = super()._run_layers(x, context, cache)
        streams = jnp.stack([p(y) for p, y in zip(self.merge, context.read_shared(STREAMS), strict=True)])
        merged = jnp.concatenate([x[None], _match_magnitude(streams, x)]).mean(0)
        return constrain(merged, *RESIDUAL), cache


def _match_magnitude(streams: jax.Array, x: jax.Array) -> jax.Array:
    """Scale vectors [N, B, S, D] to the root mean square of x, [B, S, D]."""
    target = jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
    size = jnp.mean(jnp.square(streams), -1, keepdims=True)
    return streams * (target[None] / jnp.sqrt(jnp.maximum(size, SMALLEST)))
