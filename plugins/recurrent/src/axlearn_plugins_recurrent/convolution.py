"""A short causal convolution over the tokens of a sequence.

Legend: B sequences, S tokens, W width of the convolution, C tokens of a chunk, K chunks.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.initializers import Constant, Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision, expand_to
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.recurrence import Reload, Sequences


class TokenConvolution(Protocol):
    """Mixes the latest tokens, for each channel separately.

    It is built with `channels` (a tuple of dimensions), `axes` (a logical name for each), `rngs` and `precision`.
    """

    def __call__(self, x: jax.Array, sequences: Sequences, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Apply the convolution; see `Recurrence`."""
        ...

    def cache_spec(self) -> CacheEntry:
        """Return the entry of the latest inputs; see `KeepsCache`."""
        ...


class ShortConvolution(Layer):
    """A depthwise convolution of the latest `width` tokens, followed by an activation."""

    @node
    class Config(Layer.Config["ShortConvolution"]):
        """Settings for the convolution.

        Attributes:
            width: Number of tokens, including the current one.
            bias: Learn a bias.
            activation: Function applied to the result, or None.
            init: Initializer of the weights.
        """

        channels: tuple[int, ...] = interface(default=REQUIRED)
        width: int = setting(default=4, ge=2)
        bias: bool = False
        activation: Literal["silu"] | None = "silu"
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")

    def __init__(self, cfg: Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.axes = tuple(axes)
        self.weight = self.parameter(rngs, cfg.init, (cfg.width, *cfg.channels), ("taps", *axes))
        if cfg.bias:
            self.bias = self.parameter(rngs, Constant(), cfg.channels, axes)

    def cache_spec(self) -> CacheEntry:
        """Return the entry of the latest inputs, [W - 1, *channels]."""
        cfg = self.cfg
        return CacheEntry(per="request", shape=(cfg.width - 1, *cfg.channels), dtype=self.precision.compute)

    def __call__(self, x: jax.Array, sequences: Sequences, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Apply the convolution.

        Args:
            x: [B, S, *channels].
            sequences: Facts about the sequences.
            state: Inputs before the first token, [B, W - 1, *channels]; None is zero.

        Returns:
            [B, S, *channels], and the latest inputs, [B, W - 1, *channels]; with `sequences.reload`, after each chunk,
            [B, K, W - 1, *channels].
        """
        x = sequences.clear_padding(x.astype(self.precision.compute))
        if sequences.reload is not None:
            return self._run_chunks(x, sequences, sequences.reload)
        earlier = jnp.zeros((x.shape[0], self.cfg.width - 1, *x.shape[2:]), x.dtype) if state is None else state
        return self._run(x, sequences.documents(), sequences.real, earlier)

    def _run(
        self, x: jax.Array, documents: jax.Array | None, real: jax.Array | None, earlier: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        length, width = x.shape[1], self.cfg.width
        inputs = jnp.concatenate([earlier.astype(x.dtype), x], axis=1)
        weight = self.computed(self.weight)
        y = x * expand_to(weight[-1], x.ndim)
        for distance in range(1, width):
            begin = width - 1 - distance
            tap = inputs[:, begin : begin + length]
            if documents is not None and distance < length:
                same = documents[:, distance:] == documents[:, :-distance]
                same = jnp.pad(
                    same, [(0, 0), (distance, 0)], constant_values=True
                )  # before the first token, inputs are zero
                tap = jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), tap, 0)
            y = y + tap * expand_to(weight[begin], x.ndim)
        if self.cfg.bias:
            y = y + expand_to(self.computed(self.bias), x.ndim)
        if self.cfg.activation == "silu":
            y = jax.nn.silu(y)
        counts = jnp.full((x.shape[0],), length) if real is None else jnp.sum(real, axis=1)
        latest = jax.vmap(lambda row, count: lax.dynamic_slice_in_dim(row, count, width - 1))(inputs, counts)
        return y, latest

    def _run_chunks(self, x: jax.Array, sequences: Sequences, reload: Reload) -> tuple[jax.Array, jax.Array]:
        chunk = reload.chunk
        chunks = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        restarts = reload.restarts.reshape(*reload.restarts.shape, *(1,) * (chunks.ndim - 2))
        earlier = self._before_chunks(chunks, restarts, reload.states.astype(x.dtype))

        def flatten(array: jax.Array) -> jax.Array:
            return array.reshape(-1, *array.shape[2:])

        real = None if sequences.real is None else sequences.real.reshape(-1, chunk)
        y, latest = self._run(flatten(chunks), None, real, flatten(earlier))
        return y.reshape(x.shape), latest.reshape(*chunks.shape[:2], *latest.shape[1:])

    def _before_chunks(self, chunks: jax.Array, restarts: jax.Array, states: jax.Array) -> jax.Array:
        """Return the inputs before each chunk, [B, K, W - 1, ...]. A chunk that others follow has no padding.

        Args:
            chunks: [B, K, C, ...].
            restarts: Whether a chunk begins with its state, bool [B, K, 1, ...].
            states: [B, K, W - 1, ...].
        """
        count = self.cfg.width - 1
        if chunks.shape[2] >= count:
            tails = chunks[:, :, -count:]
            previous = jnp.concatenate([jnp.zeros_like(tails[:, :1]), tails[:, :-1]], axis=1)
            return jnp.where(restarts, states, previous)
        earlier, latest = [], jnp.zeros_like(states[:, 0])
        for index in range(chunks.shape[1]):  # the convolution reaches over several chunks
            earlier.append(jnp.where(restarts[:, index], states[:, index], latest))
            latest = jnp.concatenate([earlier[-1], chunks[:, index]], axis=1)[:, -count:]
        return jnp.stack(earlier, axis=1)
