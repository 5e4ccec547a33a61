"""Mamba-2 (Dao & Gu, 2024, "Transformers are SSMs", arXiv 2405.21060).

Legend: B sequences, S tokens, D width, H heads, P size of a head, G groups of keys and queries, N state size.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, Scaled, interface, node, setting, size_of
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.initializers import Constant, Initializer
from axlearn_core.nn.layer import Context, Layer, Precision, expand_to
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_recurrent.convolution import ShortConvolution, TokenConvolution
from axlearn_plugins_recurrent.decay_initializers import LogUniformRate, TimeStepBias
from axlearn_plugins_recurrent.kernels.linear_attention import LinearAttentionOp
from axlearn_plugins_recurrent.linear_attention_layer import HEADS, LinearAttentionLayer, part_of
from axlearn_plugins_transformer.layer_roles import RecurrentRole
from axlearn_plugins_transformer.recurrence import Sequences, run_recurrent


class Mamba2(LinearAttentionLayer):
    """A state-space layer whose decay, input and output depend on the token.

    In the terms of linear attention, the paper's x, B and C are values, keys and queries:

        v, k, q = convolutions of value(x), key(x), query(x)
        step = softplus(step(x) + step_bias),  decay = -exp(log_rate) step
        y = output(norm((linear_attention(q, k, step v, decay) + skip v) * silu(gate(x))))
    """

    @node
    class Config(Layer.Config["Mamba2"], RecurrentRole):
        """Settings for the sizes and the optional parts.

        Attributes:
            num_heads: Number of heads (default: the inner width divided by `head_dim`).
            head_dim: Size of a head.
            inner_dim: Inner width; it may be relative to the width of the model.
            state_dim: Size of keys and queries.
            num_groups: Number of groups of heads that share keys and queries.
            convolution: Convolution of values, keys and queries, or None.
            eps: Constant added to the mean square in the norm.
            kernel: Implementation of the `linear_attention` op. None selects the best one.
            query: Query projection (C in the paper).
            key: Key projection (B in the paper).
            value: Value projection (x in the paper).
            step: Projection to the time steps.
            gate: Gate projection (z in the paper).
            output: Output projection.
            rate_init: Initializer of the logarithms of the decay rates.
            step_init: Initializer of the biases of the time steps.
        """

        input_dim: int = interface(default=REQUIRED)
        num_heads: int | None = setting(default=None, ge=1, le=2**24)
        head_dim: int = setting(default=64, ge=1)
        inner_dim: int | Node[int] = setting(default=Scaled(factor=2.0), ge=1)
        state_dim: int = setting(default=128, ge=1)
        num_groups: int = setting(default=1, ge=1)
        convolution: Node[TokenConvolution] | None = ShortConvolution.Config(bias=True)
        eps: float = setting(default=1e-5, gt=0)
        kernel: str | None = setting(default=None, kind="execution")
        query: Node[Projection] = Linear.Config()
        key: Node[Projection] = Linear.Config()
        value: Node[Projection] = Linear.Config()
        step: Node[Projection] = Linear.Config()
        gate: Node[Projection] = Linear.Config()
        output: Node[Projection] = Linear.Config()
        rate_init: Node[Initializer] = setting(default=LogUniformRate(), kind="training")
        step_init: Node[Initializer] = setting(default=TimeStepBias(), kind="training")

        def validate(self) -> Iterable[Problem]:
            """Check that the groups divide the heads."""
            yield from super().validate()
            if self.num_heads is not None and self.num_heads % self.num_groups:
                yield Problem(
                    path="num_groups",
                    message="does not divide num_heads",
                    got=f"num_groups={self.num_groups}, num_heads={self.num_heads}",
                    fix="set it to a divisor of num_heads",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width = cfg.input_dim
        inner = size_of(cfg.inner_dim, width)
        heads = cfg.num_heads or inner // cfg.head_dim
        if heads * cfg.head_dim != inner or heads % cfg.num_groups:
            raise ConfigError(
                Problem(
                    path="head_dim",
                    message="the heads do not fill the inner width, or the groups do not divide the heads",
                    got=f"inner width {inner}, head_dim={cfg.head_dim}, num_heads={heads}, num_groups={cfg.num_groups}",
                    fix="set head_dim to a divisor of the inner width",
                )
            )
        self.values, self.keys = (heads, cfg.head_dim), (cfg.num_groups, cfg.state_dim)
        head_axes = ("heads", "head_dim")
        group_axes = ("kv" if cfg.num_groups > 1 else None, "head_dim")  # one group serves all heads on every device

        def project(cfg_map: Node[Projection], out: tuple[int, ...], *axes: str | None) -> Any:
            return self.child(cfg_map, rngs=rngs, input_dims=(width,), output_dims=out, axes=("embed", *axes))

        self.query = project(cfg.query, self.keys, *group_axes)
        self.key = project(cfg.key, self.keys, *group_axes)
        self.value = project(cfg.value, self.values, *head_axes)
        self.gate = project(cfg.gate, self.values, *head_axes)
        self.step = project(cfg.step, (heads,), "heads")
        self.output = self.child(
            cfg.output, rngs=rngs, input_dims=self.values, output_dims=(width,), axes=(*head_axes, "embed")
        )
        self.log_rate = self.parameter(rngs, cfg.rate_init, (heads,), ("heads",))
        self.step_bias = self.parameter(rngs, cfg.step_init, (heads,), ("heads",))
        self.skip = self.parameter(rngs, Constant(value=1.0), (heads,), ("heads",))
        self.norm = self.parameter(rngs, Constant(value=1.0), self.values, head_axes)
        self.build_convolutions(cfg.convolution, rngs, group_axes, head_axes)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its state -> ([B, S, D], new state)."""
        return run_recurrent(self.mix, x, context, cache)

    def mix(self, x: jax.Array, sequences: Sequences, state: Any) -> tuple[jax.Array, Any]:
        """Process the tokens of sequences; see `Recurrence`."""
        query, key, value, latest = self.project(x, sequences, state)
        step = self.step(x).astype(jnp.float32)
        step = jax.nn.softplus(step + expand_to(self.step_bias[...].astype(jnp.float32), 3))
        step = sequences.clear_padding(step)
        result = LinearAttentionOp(
            query,
            key,
            value * step[..., None].astype(value.dtype),
            -expand_to(jnp.exp(self.log_rate[...].astype(jnp.float32)), 3) * step,
            documents=sequences.documents(),
            state=None if state is None else state["state"],
            reload=part_of(sequences, "state").reload,
            scale=1.0,
        ).run(self.cfg.kernel)
        y = result.values + lax.expand_dims(self.computed(self.skip), (0, 1, 3)) * value
        return self.finish(tag(constrain(y, *HEADS), "context"), x), {"state": result.states, **latest}

    def finish(self, values: jax.Array, x: jax.Array) -> jax.Array:
        """Gate, normalize and project [B, S, H, P] to [B, S, D]. `x` is the input of the layer."""
        y = values.astype(jnp.float32) * jax.nn.silu(self.gate(x).astype(jnp.float32))
        grouped = y.reshape(*y.shape[:2], self.keys[0], -1)
        scale = lax.rsqrt(jnp.mean(grouped * grouped, axis=-1, keepdims=True) + self.cfg.eps)
        y = (grouped * scale).reshape(y.shape).astype(values.dtype) * expand_to(self.computed(self.norm), y.ndim)
        return tag(self.output(y), "attention_out")
