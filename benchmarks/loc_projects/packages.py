"""Features that the shipped code does not know, each in its own package.

They are token shift, an 8-bit float cache, label smoothing, a recurrent layer and attention sinks.
"""

from pathlib import Path

PYPROJECT = """[project]
name = "axlearn-plugins-{name}"
version = "1.0"
dependencies = ["axlearn-core>=0.1,<0.2"]

[project.entry-points."axlearn.components"]
{name} = "{module}:{component}"

[project.entry-points."axlearn.features"]
{name} = "{module}:{feature}"
"""

TOKEN_SHIFT = '''"""Token shift (Peng et al., 2023, RWKV)."""

from typing import Any

import jax.numpy as jnp

from axlearn_core.config import REQUIRED, Node, find, interface, node, patch, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.layer import Layer
from axlearn_core.plugins.feature import Feature


class TokenShift(Layer):
    """`inner(x + mix * (x of the token before - x))`."""

    @node
    class Config(Layer.Config["TokenShift"]):
        input_dim: int = interface(default=REQUIRED)
        inner: Node[Any] = REQUIRED
        mix: float = setting(default=0.5, ge=0, le=1)

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.inner = self.child(cfg.inner, rngs=rngs, input_dim=cfg.input_dim)

    def __call__(self, x):
        """[B, S, D] -> [B, S, D]."""
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return self.inner(x + self.cfg.mix * (before - x))


@node
class UseTokenShift(Feature):
    """Mixes each token with the previous one before each feed-forward layer. Sets `mix` of existing ones."""

    stage = "wrap"

    mix: float = setting(default=0.5, ge=0, le=1)

    def apply(self, cfg):
        found = find(cfg, "**.feed_forward")
        if not found:
            raise ConfigError(Problem(path="model", message="has no feed_forward", fix="remove token-shift"))
        inner = {p: n.inner if isinstance(n, TokenShift.Config) else n for p, n in found.items()}
        return patch(cfg, {p: TokenShift.Config(inner=n, mix=self.mix) for p, n in inner.items()})

    def in_effect(self, cfg):
        return self.apply(cfg) == cfg
'''

FP8_CACHE = '''"""Stores keys and values as 8-bit floats."""

import attrs

from axlearn_core.config import Configurable, find, node, patch, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.kv_cache import ContiguousCache


class Fp8Cache(Configurable):
    """Stores the contiguous layout in `dtype`. Attention computes in the dtype of the queries."""

    @node
    class Config(Configurable.Config["Fp8Cache"]):
        dtype: str = setting(default="float8_e4m3fn")

    def __init__(self, cfg):
        self.cfg, self.arrays = cfg, ContiguousCache.Config().build()

    def spec(self, num_kv_heads, head_dim, dtype, window=None):
        return self.arrays.spec(num_kv_heads, head_dim, self.cfg.dtype, window)

    def attend(self, cache, op, slots, kernel):
        cache, seen = self.arrays.append(cache, op.key, op.value, slots)
        key, value = seen.key.astype(op.key.dtype), seen.value.astype(op.value.dtype)
        return attrs.evolve(op, key=key, value=value, query_slots=slots, key_slots=seen.slots).run(kernel), cache


@node
class UseFp8Cache(Feature):
    """Makes every attention layer cache its keys and values as 8-bit floats of `dtype`."""

    stage = "replace"

    dtype: str = setting(default="float8_e4m3fn")

    def apply(self, cfg):
        found = find(cfg, "**.kv_cache")
        if not found:
            raise ConfigError(Problem(path="model", message="has no kv_cache", fix="remove fp8-cache"))
        return patch(cfg, {path: Fp8Cache.Config(dtype=self.dtype) for path in found})

    def in_effect(self, cfg):
        return self.apply(cfg) == cfg
'''

LABEL_SMOOTHING = '''"""Label smoothing (Szegedy et al., 2016, section 7) as an objective."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Configurable, Node, node, patch, setting
from axlearn_core.contracts.parts import Objective
from axlearn_core.plugins.feature import Feature
from axlearn_core.train.objective import ModelLoss


class LabelSmoothing(Configurable, nnx.Module):
    """`(1 - amount) * base + amount * (cross-entropy of the uniform distribution)`."""

    @node
    class Config(Configurable.Config["LabelSmoothing"]):
        amount: float = setting(default=0.1, ge=0, le=1)
        base: Node[Objective] = ModelLoss.Config()

    def __init__(self, cfg, *, rngs, model):
        self.amount, self.base = cfg.amount, cfg.base.build(rngs=rngs, model=model)

    def loss(self, model, batch, key):
        loss, summaries = self.base.loss(model, batch, key)
        logs = jax.nn.log_softmax(model(batch["tokens"], batch.get("positions"), batch.get("segment_ids")))
        uniform = -jnp.sum(jnp.mean(logs, axis=-1) * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return (1 - self.amount) * loss + self.amount * uniform, {**summaries, "uniform": uniform}


@node
class SmoothLabels(Feature):
    """Adds label smoothing to the objective. Sets `amount` of existing smoothing."""

    stage = "wrap"

    amount: float = setting(default=0.1, ge=0, le=1)

    def apply(self, cfg):
        old = ModelLoss.Config() if cfg.objective is None else cfg.objective
        base = old.base if isinstance(old, LabelSmoothing.Config) else old
        return patch(cfg, {"objective": LabelSmoothing.Config(amount=self.amount, base=base)})

    def in_effect(self, cfg):
        return self.apply(cfg) == cfg
'''

MIN_GRU = '''"""minGRU (Feng et al., 2024, arXiv 2410.01201): a gated linear recurrence that replaces attention."""

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.config.tree import fill_slots
from axlearn_core.errors import Problem
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import AttentionLayer
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.layer_roles import RecurrentRole
from axlearn_plugins_transformer.recurrence import run_recurrent


class MinGRU(Layer):
    """`h = (1 - z) * h of the token before + z * value(x)`, with `z = sigmoid(gate(x) + gate_bias)`."""

    @node
    class Config(Layer.Config["MinGRU"], RecurrentRole):
        input_dim: int = interface(default=REQUIRED)
        gate_bias: float = setting(default=0.0)
        projection: Node[Projection] = Linear.Config()

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        width, axes = (cfg.input_dim,), ("embed", "mlp")
        self.gate = self.child(cfg.projection, rngs=rngs, input_dims=width, output_dims=width, axes=axes)
        self.value = self.child(cfg.projection, rngs=rngs, input_dims=width, output_dims=width, axes=axes)

    def cache_spec(self):
        return CacheEntry(per="request", shape=(self.cfg.input_dim,), dtype="float32")

    def __call__(self, x, context, cache=None):
        return run_recurrent(self.mix, x, context, cache)

    def mix(self, x, sequences, state):
        gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32) + self.cfg.gate_bias)
        values, reload = gate * self.value(x), sequences.reload
        rows, length, width = x.shape
        documents, restarts = sequences.documents(), jnp.zeros((rows, length), bool)
        starts = jnp.zeros_like(values)
        if documents is not None:
            restarts = jnp.pad(jnp.diff(documents, axis=1) != 0, [(0, 0), (1, 0)])
        if reload is not None:  # chunks of a serving step may begin with states of their own
            restarts = restarts.at[:, :: reload.chunk].set(reload.restarts)
            starts = starts.at[:, :: reload.chunk].set(reload.states)

        def step(h, token):
            keep, value, restart, start = token
            h = keep * jnp.where(restart[:, None], start, h) + value
            return h, h

        decays = sequences.clear_padding(1.0 - gate, 1.0)
        tokens = (decays, sequences.clear_padding(values), restarts, starts)
        first = jnp.zeros((rows, width)) if state is None else state
        last, states = lax.scan(step, first, tuple(jnp.moveaxis(part, 1, 0) for part in tokens))
        states = jnp.moveaxis(states, 0, 1)
        return states.astype(x.dtype), last if reload is None else states[:, reload.chunk - 1 :: reload.chunk]


@node
class UseMinGRU(Feature):
    """Replaces attention with minGRU. Sets `gate_bias` of existing ones."""

    stage = "replace"

    gate_bias: float = setting(default=0.0)

    def apply(self, cfg):
        no_match = Problem(path="model", message="has no attention to replace", fix="remove min-gru")
        new = MinGRU.Config(gate_bias=self.gate_bias)
        return fill_slots(cfg, AttentionLayer, lambda path, old: new, no_match=no_match)

    def in_effect(self, cfg):
        return self.apply(cfg) == cfg
'''

HEAD_SINKS = '''"""Attention sinks (Agarwal et al., 2025, gpt-oss): a trained logit per head without a value."""

import attrs

from axlearn_core.config import REQUIRED, interface, map, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.initializers import Constant
from axlearn_core.nn.layer import Layer
from axlearn_core.plugins.feature import Feature


class Sinks(Layer):
    """Adds sinks to an `AttentionOp`. They are `start` plus a parameter that is 0 before training."""

    @node
    class Config(Layer.Config["Sinks"]):
        num_heads: int = interface(default=REQUIRED)
        start: float = setting(default=0.0)

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.sinks = self.parameter(rngs, Constant(value=0.0), (cfg.num_heads,), ("heads",))

    def __call__(self, op):
        return attrs.evolve(op, sinks=self.computed(self.sinks) + self.cfg.start)


@node
class UseSinks(Feature):
    """Adds sinks to every attention layer with a slot `scores`."""

    stage = "replace"

    start: float = setting(default=0.0)

    def apply(self, cfg):
        found, sinks = [], Sinks.Config(start=self.start)
        changed = map(cfg, lambda p: found.append(p) or attrs.evolve(p, scores=sinks) if hasattr(p, "scores") else p)
        if not found:
            raise ConfigError(Problem(path="model", message="has no slot `scores`", fix="remove head-sinks"))
        return changed

    def in_effect(self, cfg):
        return self.apply(cfg) == cfg
'''

SOURCES = {
    "token-shift": (TOKEN_SHIFT, "TokenShift", "UseTokenShift"),
    "fp8-cache": (FP8_CACHE, "Fp8Cache", "UseFp8Cache"),
    "label-smoothing": (LABEL_SMOOTHING, "LabelSmoothing", "SmoothLabels"),
    "min-gru": (MIN_GRU, "MinGRU", "UseMinGRU"),
    "head-sinks": (HEAD_SINKS, "Sinks", "UseSinks"),
}
"""Source, component and feature class of each package, by feature."""


def folder(root: Path, feature: str) -> Path:
    """Return the folder of a feature's package in a project."""
    return root / "packages" / f"axlearn-plugins-{feature}"


def write(root: Path, feature: str) -> None:
    """Write the package of a feature to a project."""
    source, component, cls = SOURCES[feature]
    module = f"axlearn_plugins_{feature.replace('-', '_')}"
    names = {"name": feature, "module": module, "component": component, "feature": cls}
    package = folder(root, feature)
    (package / "src" / module).mkdir(parents=True)
    (package / "pyproject.toml").write_text(PYPROJECT.format(**names))
    (package / "src" / module / "__init__.py").write_text(source)
