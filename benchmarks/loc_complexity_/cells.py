"""Proof, for each cell, that a feature is active: the output of the model changes, and equals one that is placed by hand.

The hand-placed model is the plain one, built and then changed module by module, with implementations of its own: a
rotation of complex numbers, a loop over experts, a shift. It uses nothing of what the feature brings but its parameters.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.compose.functional import Functional
from axlearn_plugins_moe.layer import MixtureOfExperts
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.feed_forward import ACTIVATIONS

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 6), dtype=np.int32)
EQUAL, DIFFERENT = 1e-5, 1e-3
"""Of the norm of the output: at most so far from the hand-placed one, at least so far from the plain one."""


class HandRope(nnx.Module):
    """Turns pairs of features as complex numbers, by position * 100 ** (-2 i / head_dim)."""

    def __call__(self, query: Any, key: Any, positions: Any) -> Any:
        """See the rotary embedding."""
        return self.turned(query, positions), self.turned(key, positions)

    def turned(self, x: Any, positions: Any) -> Any:
        half = x.shape[-1] // 2
        angle = positions[..., None] * 100.0 ** (-jnp.arange(half)[None, None] / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, :, None]
        return jnp.concatenate([turned.real, turned.imag], axis=-1)


class HandExperts(nnx.Module):
    """Every expert on every token; the two with the largest logits count, by the softmax over those two."""

    def __init__(self, experts: Any):
        self.experts = experts

    def __call__(self, x: Any) -> Any:
        """[B, S, D] -> [B, S, D]."""
        own = self.experts
        logits = x @ own.router.weight[...]
        kept = jnp.where(logits >= jnp.sort(logits, axis=-1)[..., -2:-1], jnp.exp(logits), 0.0)
        weights, y = kept / kept.sum(-1, keepdims=True), jnp.zeros_like(x)
        activation = ACTIVATIONS[own.cfg.activation]
        for e in range(4):
            up = x @ own.up.weight[e]
            hidden = activation(up) if own.gate is None else activation(x @ own.gate.weight[e]) * up
            y = y + weights[..., e, None] * (hidden @ own.down.weight[e])
        return y


class HandShift(nnx.Module):
    """The layer on 0.7 of each token and 0.3 of the one before it."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        """[B, S, D] -> [B, S, D]."""
        return self.layer(0.7 * x + 0.3 * jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1))


class HandDropout(nnx.Module):
    """Every second output of the layer set to zero, the others doubled."""

    def __init__(self, layer: Any):
        self.layer = layer

    def init_cache(self, batch: int, length: int) -> Any:
        """See the attention."""
        return self.layer.init_cache(batch, length)

    def __call__(self, x: Any, *args: Any) -> Any:
        """[B, S, D] -> what the layer gives, half of it."""
        result = self.layer(x, *args)
        kept = 2.0 * (jnp.arange(x.shape[-1]) % 2)[None, None]
        return (result[0] * kept, *result[1:]) if isinstance(result, tuple) else result * kept


@contextmanager
def every_second() -> Iterator[None]:
    """Random masks keep every second position of the last dimension, so that masks can be placed by hand."""
    real = jax.random.bernoulli
    jax.random.bernoulli = lambda key, p, shape, **_: jnp.broadcast_to(jnp.arange(shape[-1]) % 2 == 1, shape)
    try:
        yield
    finally:
        jax.random.bernoulli = real


def place_rope(layer: Any, _: Any) -> None:
    layer.attention.cfg = attrs.evolve(layer.attention.cfg, position=RotaryEmbedding.Config())
    layer.attention.position = HandRope()


def place_experts(layer: Any, activated: Any) -> None:
    if not isinstance(activated.feed_forward, MixtureOfExperts):
        raise TypeError("there are no experts")
    layer.feed_forward = HandExperts(activated.feed_forward)


def place_shift(layer: Any, _: Any) -> None:
    layer.feed_forward = HandShift(layer.feed_forward)


def place_dropout(layer: Any, _: Any) -> None:
    layer.attention, layer.feed_forward = HandDropout(layer.attention), HandDropout(layer.feed_forward)


BY_HAND: dict[str, Callable[[Any, Any], None]] = {
    "rope": place_rope,
    "moe": place_experts,
    "token-shift": place_shift,
    "dropout": place_dropout,
}


def built(cfg: Any) -> Any:
    """The model of an experiment, each parameter filled by its name, so that models share what they have in common."""
    functional = Functional.of(cfg.model)
    key = jax.random.key(0) if functional.streams else None  # as in training, where it draws
    return functional.bind({path: _filled(path, spec) for path, spec in functional.abstract.items()}, key=key)


def _filled(path: str, spec: Any) -> jax.Array:
    name = path.replace(".inner.", ".")
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).normal(size=spec.shape) * 0.7
    return jnp.asarray(values + (1.0 if name.endswith("scale") else 0.0), spec.dtype)


def active(plain: Any, activated: Any, feature: str, *, scanned: bool) -> bool:
    """Whether the feature is active in a cell: configs of the experiment without and with it.

    Layers run one by one, as for generation; with `scanned` also as in training, which has to be compiled.
    """
    with every_second():
        return _active(plain, activated, feature, scanned)


def _active(plain: Any, activated: Any, feature: str, scanned: bool) -> bool:
    off, on = built(plain), built(activated)
    layers, hand = on.unstacked(), off.unstacked()
    before, after = _forward(off.unstacked()), _forward(layers)
    for layer, other in zip(hand.decoder.layer, layers.decoder.layer, strict=True):
        BY_HAND[feature](layer, other)
    expected, norm = _forward(hand), np.linalg.norm(after)
    equal = np.linalg.norm(after - expected) <= EQUAL * norm
    if scanned:
        equal &= np.linalg.norm(_forward(on) - expected) <= EQUAL * norm
    return bool(np.isfinite(norm) and equal and np.linalg.norm(after - before) >= DIFFERENT * norm)


def _forward(model: Any) -> np.ndarray:
    return np.asarray(model(TOKENS))
