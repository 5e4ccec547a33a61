"""Check for each cell that a feature is active: it changes the output, which equals a hand-made reference.

The reference is the plain model with modules replaced one by one after it was built. It has independent
implementations, such as a rotation of complex numbers, a loop over experts, or a shift. It only uses the parameters of
the feature. The checks compare logits, for a cache layout and a recurrent layer the logits of a generation through the
caches, and for an objective the loss.
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
from axlearn_core.compose.objective import ModelAndObjective
from axlearn_core.config import node
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS
from axlearn_plugins_transformer.kv_cache import ContiguousCache

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 6), dtype=np.int32)
CHUNKS = (4, 1, 1)
"""Numbers of tokens that go through the caches at a time, for the prompt and after it."""
BATCHES = tuple(
    {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "weights": np.array(weights, np.float32)}
    for weights in ([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]], [[0, 1, 0, 0, 0]] * 2, [[0, 0, 1, 0, 1], [1, 1, 0, 0, 0]])
)
"""Number of batches with different targets. A single loss may match by chance."""
EQUAL, DIFFERENT = 1e-5, 1e-3
"""Maximum distance from the reference and minimum distance from the plain output, relative to the norm."""


class HandRope(nnx.Module):
    """Rotates pairs of features as complex numbers, by position * 100 ** (-2 i / head_dim)."""

    def __call__(self, query: Any, key: Any, positions: Any) -> Any:
        """Apply the rotation, like the rotary embedding."""
        return self.turned(query, positions), self.turned(key, positions)

    def turned(self, x: Any, positions: Any) -> Any:
        half = x.shape[-1] // 2
        angle = positions[..., None] * 100.0 ** (-jnp.arange(half)[None, None] / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, :, None]
        return jnp.concatenate([turned.real, turned.imag], axis=-1)


class HandExperts(nnx.Module):
    """Runs every expert on every token. The two experts with the largest logits count, weighted by their softmax."""

    def __init__(self, experts: Any):
        self.experts = experts

    def __call__(self, x: Any) -> Any:
        """Map [B, S, D] to [B, S, D]."""
        own = self.experts
        logits = x @ own.router.weight[...]
        gates = jnp.where(logits >= jnp.sort(logits, axis=-1)[..., -2:-1], jnp.exp(logits), 0.0)
        weights, y = gates / gates.sum(-1, keepdims=True), jnp.zeros_like(x)
        activation = ACTIVATIONS[own.cfg.activation]
        for e in range(4):
            up = x @ own.up.weight[e]
            hidden = activation(up) if own.gate is None else activation(x @ own.gate.weight[e]) * up
            y = y + weights[..., e, None] * (hidden @ own.down.weight[e])
        return y


class HandShift(nnx.Module):
    """Applies the layer to 0.7 of each token plus 0.3 of the previous token."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        """Map [B, S, D] to [B, S, D]."""
        return self.layer(0.7 * x + 0.3 * jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1))


class HandDropout(nnx.Module):
    """Sets every second output of the layer to zero and doubles the others."""

    def __init__(self, layer: Any):
        self.layer = layer

    def cache_spec(self) -> Any:
        """Return the entries of the layer's cache."""
        return self.layer.cache_spec()

    def __call__(self, x: Any, *args: Any) -> Any:
        """Apply the layer to [B, S, D] and drop half of its output."""
        result = self.layer(x, *args)
        mask = 2.0 * (jnp.arange(x.shape[-1]) % 2)[None, None]
        return (result[0] * mask, *result[1:]) if isinstance(result, tuple) else result * mask


class HandCache(ContiguousCache):
    """Rounds keys and values to three mantissa bits, or to steps of 2 ** -9 below 2 ** -6."""

    @node
    class Config(ContiguousCache.Config):
        """Settings of `HandCache`. There are none."""

    def attend(self, cache: Any, op: Any, slots: Any, kernel: Any) -> Any:
        """Append keys and values, and attend. See `KVCache`."""
        op = attrs.evolve(op, key=self.rounded(op.key), value=self.rounded(op.value))
        return super().attend(cache, op, slots, kernel)

    def rounded(self, x: Any) -> Any:
        _, exponent = np.frexp(np.asarray(x))
        step = np.float32(2) ** np.maximum(exponent - 4, -9)
        return jnp.asarray(np.rint(np.asarray(x) / step) * step, x.dtype)


class HandRecurrence(nnx.Module):
    """Sums the gated values of all earlier tokens, each times the product of the decays since then."""

    def __init__(self, recurrent: Any):
        self.recurrent = recurrent

    def __call__(self, x: Any, *_: Any) -> Any:
        """Map [B, S, D] to [B, S, D], without a cache."""
        own, length = self.recurrent, x.shape[1]
        gate = 1.0 / (1.0 + jnp.exp(-(x @ own.gate.weight[...] + 0.5)))
        total = jnp.cumsum(jnp.log1p(-gate), axis=1)
        earlier = jnp.arange(length)[:, None] >= jnp.arange(length)
        decays = jnp.where(earlier[None, :, :, None], jnp.exp(total[:, :, None] - total[:, None]), 0.0)
        return jnp.einsum("btsd,bsd->btd", decays, gate * (x @ own.value.weight[...])), None


@attrs.frozen(eq=False)
class HandSinksOp(AttentionOp):
    """Attention whose result is scaled by the share of the softmax that the keys get."""

    logits: Any = attrs.field(default=None, kw_only=True)

    def run(self, kernel: str | None = None) -> Any:
        """Return the scaled result of attention without sinks."""
        fields = {a.name: getattr(self, a.name) for a in attrs.fields(AttentionOp)}
        result, log_sum_exp = AttentionOp(**fields | {"log_sum_exp": True}).run(kernel)
        return result / (1.0 + jnp.exp(self.logits[None, None] - log_sum_exp))[..., None]


class HandSinks(nnx.Module):
    """Adds 1 to the trained logits of the feature's sinks."""

    def __init__(self, sinks: Any):
        self.sinks = sinks

    def __call__(self, op: Any) -> Any:
        """Return the op with sinks."""
        fields = {a.name: getattr(op, a.name) for a in attrs.fields(AttentionOp)}
        return HandSinksOp(**fields, logits=self.sinks.sinks[...] + 1.0)


@contextmanager
def every_second() -> Iterator[None]:
    """Make random masks keep every second position of the last dimension, so that the reference can apply the same mask."""
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


def place_cache(layer: Any, _: Any) -> None:
    layer.attention.cfg = attrs.evolve(layer.attention.cfg, kv_cache=HandCache.Config())


def place_recurrence(layer: Any, activated: Any) -> None:
    layer.attention = HandRecurrence(activated.attention)


def place_sinks(layer: Any, activated: Any) -> None:
    layer.attention.cfg = attrs.evolve(layer.attention.cfg, scores=activated.attention.cfg.scores)
    layer.attention.scores = HandSinks(activated.attention.scores)


def place_dropout(layer: Any, _: Any) -> None:
    layer.attention, layer.feed_forward = HandDropout(layer.attention), HandDropout(layer.feed_forward)


BY_HAND: dict[str, Callable[[Any, Any], None]] = {
    "rope": place_rope,
    "moe": place_experts,
    "token-shift": place_shift,
    "dropout": place_dropout,
    "fp8-cache": place_cache,
    "min-gru": place_recurrence,
    "head-sinks": place_sinks,
}
CACHED = ("fp8-cache", "min-gru")
"""Features whose cells generate through the caches."""


def built(cfg: Any) -> Any:
    """Return the model of an experiment. Parameters depend only on their names, so models share common parameters."""
    functional = Functional.from_config(cfg.model)
    key = jax.random.key(0) if functional.streams else None  # as in training, which draws random numbers
    return functional.bind({path: _filled(path, spec) for path, spec in functional.abstract.items()}, key=key)


def _filled(path: str, spec: Any) -> jax.Array:
    name = path.replace(".inner.", ".").replace(".base.", ".")
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).normal(size=spec.shape) * 0.7
    return jnp.asarray(values + (1.0 if name.endswith("scale") else 0.0), spec.dtype)


def active(plain: Any, activated: Any, feature: str) -> bool:
    """Return whether the feature is active in a cell, given the configs without and with it.

    Layers run one by one, as in generation. If the experiment scans them, they also run as in training, which must
    compile.
    """
    if feature == "label-smoothing":
        return _objective_active(plain, activated)
    with every_second():
        return _layers_active(plain, activated, feature)


def _layers_active(plain: Any, activated: Any, feature: str) -> bool:
    run = _generate if feature in CACHED else _forward
    off, on = built(plain), built(activated)
    layers, hand = on.unstacked(), off.unstacked()
    before, after = run(off.unstacked()), run(layers)
    if run is _generate and not _equal(before, _forward(off.unstacked())):
        return False  # the caches of the plain model do not store earlier tokens
    for layer, other in zip(hand.decoder.layer, layers.decoder.layer, strict=True):
        BY_HAND[feature](layer, other)
    expected = _generate(hand) if feature == "fp8-cache" else _forward(hand)
    scanned = activated.model.decoder.stack.mode == "scan" and feature != "fp8-cache"
    equal = _equal(after, expected) and (not scanned or _equal(_forward(on), expected))
    return equal and not _equal(after, before, DIFFERENT)


def _objective_active(plain: Any, activated: Any) -> bool:
    """Check that the loss is 0.8 of the model's loss plus 0.2 of the mean negative log-probability of all tokens, by NumPy."""
    model = built(plain)
    before, after, own = _losses(plain), _losses(activated), np.array([model.loss(batch)[0] for batch in BATCHES])
    logits = np.asarray(model(BATCHES[0]["tokens"]), np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    uniform = np.log(np.exp(shifted).sum(-1)) - shifted.mean(-1)
    expected = 0.8 * own + 0.2 * np.array([uniform[batch["weights"] > 0].mean() for batch in BATCHES])
    return _equal(after, expected) and not _equal(after, before, DIFFERENT)


def _losses(cfg: Any) -> np.ndarray:
    """Return the training loss of a config on each batch."""
    model = built(cfg)
    if cfg.objective is None:
        return np.array([model.loss(batch)[0] for batch in BATCHES])
    objective = ModelAndObjective.from_config(cfg).bind_objective({}, {})
    return np.array([objective.loss(model, batch, None)[0] for batch in BATCHES])


def _equal(a: Any, b: Any, tolerance: float = EQUAL) -> bool:
    """Return whether the distance is finite and at most a fraction of the norm of `a`."""
    norm = np.linalg.norm(a)
    return bool(np.isfinite(norm) and np.linalg.norm(np.asarray(a) - np.asarray(b)) <= tolerance * norm)


def _forward(model: Any) -> np.ndarray:
    return np.asarray(model(TOKENS))


def _generate(model: Any) -> np.ndarray:
    """Return the logits of all tokens, generated a few at a time through the model's caches."""
    rows, length = TOKENS.shape
    cache, logits = model.init_cache(rows, length + 2), []
    for part in np.split(TOKENS, np.cumsum(CHUNKS)[:-1], axis=1):
        result, cache = model(part, cache=cache)
        logits.append(np.asarray(result))
    return np.concatenate(logits, axis=1)
