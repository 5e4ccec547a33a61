"""Gated DeltaNet, and Kimi delta attention as one of its forms.

Legend: B sequences, S tokens, D width, G heads of queries and keys, H heads of values, K key size, V value size.
"""

from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.initializers import Initializer
from axlearn_core.nn.layer import Context, Layer, Precision, expand_to
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_recurrent.convolution import ShortConvolution, TokenConvolution
from axlearn_plugins_recurrent.decay_initializers import LogUniformRate, TimeStepBias
from axlearn_plugins_recurrent.kernels.linear_attention import LinearAttentionOp
from axlearn_plugins_recurrent.linear_attention_layer import HEADS, LinearAttentionLayer, part_of
from axlearn_plugins_transformer.layer_roles import RecurrentRole
from axlearn_plugins_transformer.norm import Norm, RMSNorm
from axlearn_plugins_transformer.recurrence import Sequences, run_recurrent


class GatedDeltaNet(LinearAttentionLayer):
    """Linear attention with the delta rule and a decay (Yang et al., 2024, arXiv 2412.06464).

    Each head keeps a matrix that maps keys to values. A token multiplies it by a decay, and replaces a share of the value that is
    stored under its key. With `decay_per="element"`, `rank` and a sigmoid gate, this is Kimi delta attention (Kimi Team, 2025,
    arXiv 2510.26692).

        q, k, v = convolutions of query(x), key(x), value(x);  q and k are normalized to length 1
        decay = -exp(log_rate) softplus(decay(x) + time_bias),  strength = sigmoid(strength(x))
        y = output(norm(linear_attention(q, k, v, decay, strength)) * activation(gate(x)))
    """

    @node
    class Config(Layer.Config["GatedDeltaNet"], RecurrentRole):
        """Settings for the heads and the optional parts.

        Attributes:
            num_heads: Number of heads of the values.
            num_key_heads: Number of heads of the queries and keys (default: `num_heads`).
            key_dim: Size of a key (default: the width divided by `num_heads`).
            value_dim: Size of a value (default: `key_dim`).
            decay_per: Whether a head has one decay, or one for each element of the key.
            rank: Rank of the maps to decays and gates; None uses full maps.
            gate_activation: Activation of the gate.
            strength_scale: Largest strength. With 2, a token can negate what the state has for its key (Grazzi et al., 2024, arXiv
                2411.12537).
            convolution: Convolution of queries, keys and values, or None.
            norm: Norm of each head's result.
            kernel: Implementation of the `linear_attention` op. None selects the best one.
            query: Query projection.
            key: Key projection.
            value: Value projection.
            decay: Projection to the decays, after `decay_down` if `rank` is set.
            strength: Projection to the strengths.
            gate: Projection to the gates, after `gate_down` if `rank` is set.
            output: Output projection.
            rate_init: Initializer of the logarithms of the decay rates.
            time_init: Initializer of the biases of the decays.
        """

        input_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=REQUIRED, ge=1, le=2**24)
        num_key_heads: int | None = setting(default=None, ge=1)
        key_dim: int | None = setting(default=None, ge=1)
        value_dim: int | None = setting(default=None, ge=1)
        decay_per: Literal["head", "element"] = "head"
        rank: int | None = setting(default=None, ge=1)
        gate_activation: Literal["silu", "sigmoid"] = "silu"
        strength_scale: float = setting(default=1.0, gt=0, le=2, hide_default=True)
        convolution: Node[TokenConvolution] | None = ShortConvolution.Config()
        norm: Node[Norm] = RMSNorm.Config()
        kernel: str | None = setting(default=None, kind="execution")
        query: Node[Projection] = Linear.Config()
        key: Node[Projection] = Linear.Config()
        value: Node[Projection] = Linear.Config()
        decay_down: Node[Projection] = Linear.Config()
        decay: Node[Projection] = Linear.Config()
        strength: Node[Projection] = Linear.Config()
        gate_down: Node[Projection] = Linear.Config()
        gate: Node[Projection] = Linear.Config()
        output: Node[Projection] = Linear.Config()
        rate_init: Node[Initializer] = setting(default=LogUniformRate(), kind="training")
        time_init: Node[Initializer] = setting(default=TimeStepBias(), kind="training")

        def validate(self) -> Iterable[Problem]:
            """Check that the numbers of heads go together."""
            yield from super().validate()
            if self.num_key_heads is not None and self.num_heads % self.num_key_heads:
                yield Problem(
                    path="num_key_heads",
                    message="does not divide num_heads",
                    got=f"num_key_heads={self.num_key_heads}, num_heads={self.num_heads}",
                    fix="set it to a divisor of num_heads",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, heads = cfg.input_dim, cfg.num_heads
        if cfg.key_dim is None and width % heads:
            raise ConfigError(
                Problem(
                    path="num_heads",
                    message="does not divide the width of the model",
                    got=f"num_heads={heads}, width {width}",
                    fix="set key_dim, or change num_heads",
                )
            )
        key_dim = cfg.key_dim or width // heads
        keys, values = (cfg.num_key_heads or heads, key_dim), (heads, cfg.value_dim or key_dim)
        self.keys, self.values = keys, values
        decays = (heads, key_dim) if cfg.decay_per == "element" else (heads,)
        key_axes, value_axes = ("heads" if keys[0] == heads else "kv", "head_dim"), ("heads", "head_dim")

        def project(cfg_map: Node[Projection], source: tuple[int, ...], out: tuple[int, ...], *axes: str | None) -> Any:
            return self.child(cfg_map, rngs=rngs, input_dims=source, output_dims=out, axes=axes)

        self.query = project(cfg.query, (width,), keys, "embed", *key_axes)
        self.key = project(cfg.key, (width,), keys, "embed", *key_axes)
        self.value = project(cfg.value, (width,), values, "embed", *value_axes)
        source = (width,)
        if cfg.rank is not None:
            source = (cfg.rank,)
            self.decay_down = project(cfg.decay_down, (width,), source, "embed", "rank")
            self.gate_down = project(cfg.gate_down, (width,), source, "embed", "rank")
        # The default rules do not shard the `rank` axis of an output. If the rank is an input, its axis is named `embed`.
        self.decay = project(cfg.decay, source, decays, "embed", *value_axes[: len(decays)])
        self.gate = project(cfg.gate, source, values, "embed", *value_axes)
        self.strength = project(cfg.strength, (width,), (heads,), "embed", "heads")
        self.output = project(cfg.output, values, (width,), *value_axes, "embed")
        self.log_rate = self.parameter(rngs, cfg.rate_init, (heads,), ("heads",))
        self.time_bias = self.parameter(rngs, cfg.time_init, decays, value_axes[: len(decays)])
        self.norm = self.child(cfg.norm, rngs=rngs, dim=values[1])
        self.build_convolutions(cfg.convolution, rngs, key_axes, value_axes)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its state -> ([B, S, D], new state)."""
        return run_recurrent(self.mix, x, context, cache)

    def mix(self, x: jax.Array, sequences: Sequences, state: Any) -> tuple[jax.Array, Any]:
        """Process the tokens of sequences; see `Recurrence`."""
        query, key, value, latest = self.project(x, sequences, state)
        decay, strength = self.gates(x)
        result = LinearAttentionOp(
            _unit(query),
            _unit(key),
            value,
            sequences.clear_padding(decay),
            strength=sequences.clear_padding(strength),
            documents=sequences.documents(),
            state=None if state is None else state["state"],
            reload=part_of(sequences, "state").reload,
            scale=self.keys[1] ** -0.5,
        ).run(self.cfg.kernel)
        y = tag(constrain(result.values, *HEADS), "context")
        return self.finish(y, x), {"state": result.states, **latest}

    def gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the decays, float32 [B, S, H] or [B, S, H, K], and the strengths, float32 [B, S, H]."""
        source = x if self.cfg.rank is None else self.decay_down(x)
        step = self.decay(source).astype(jnp.float32)
        step = jax.nn.softplus(step + expand_to(self.time_bias[...].astype(jnp.float32), step.ndim))
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))
        rate = rate[:, None] if step.ndim == 4 else rate
        strength = jax.nn.sigmoid(self.strength(x).astype(jnp.float32))
        if self.cfg.strength_scale != 1:
            strength = strength * self.cfg.strength_scale
        return -jax.lax.expand_dims(rate, (0, 1)) * step, strength

    def finish(self, values: jax.Array, x: jax.Array) -> jax.Array:
        """Normalize, gate and project [B, S, H, V] to [B, S, D]. `x` is the input of the layer."""
        source = x if self.cfg.rank is None else self.gate_down(x)
        activate = jax.nn.silu if self.cfg.gate_activation == "silu" else jax.nn.sigmoid
        gate = activate(self.gate(source).astype(jnp.float32)).astype(values.dtype)
        return tag(self.output(self.norm(values) * gate), "attention_out")


def _unit(x: jax.Array) -> jax.Array:
    """Normalize [..., K] to length 1."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
