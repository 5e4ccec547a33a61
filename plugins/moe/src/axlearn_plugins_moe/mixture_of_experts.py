"""The mixture-of-experts layer, in which each token uses only some experts."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, Scaled, interface, node, setting, size_of
from axlearn_core.errors import Problem
from axlearn_core.nn import padding
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.summaries import Summary, add_summary, module_scope
from axlearn_plugins_moe.dispatch import Dispatch, DroplessDispatch
from axlearn_plugins_moe.experts import ExpertProjection, Experts, build_stacked
from axlearn_plugins_moe.routers import SoftmaxRouter
from axlearn_plugins_moe.routing import Router, Routing, assignment_mask, count_assignments
from axlearn_plugins_transformer.batch_invariant import KERNEL
from axlearn_plugins_transformer.feed_forward import FeedForward
from axlearn_plugins_transformer.kernels.gated_linear_unit import Activation, ActivationFunction, GatedForm
from axlearn_plugins_transformer.layer_roles import ExpertsRole
from axlearn_plugins_transformer.norm import Norm


class MixtureOfExperts(Layer):
    """A weighted sum of the outputs of the experts that the router chooses for a token.

    It computes `sum(weight_e * expert_e(x))` (Shazeer et al., 2017). It has the interface of a feed-forward layer and
    can replace one anywhere.
    """

    @node
    class Config(Layer.Config["MixtureOfExperts"], ExpertsRole):
        """Settings for the experts, the router and the dispatch.

        Attributes:
            num_experts: Number of experts.
            top_k: Experts per token. This is an average if the experts choose the tokens.
            hidden_dim: Hidden size of one expert; it may be relative to the width.
            activation: Activation function of the experts: a name, or a node such as `{type: swish, beta: 1.702}`.
            form: How an expert combines its gate and up projections, such as `{type: clamped-form}`. None is
                `activation(gate) * up`.
            weigh_inputs: Multiply the input of an expert by the routing weight, instead of its output (Llama 4).
            norm: Norm of the experts' input, or None. The router and `shared` read the input without it (Gemma 4).
            router: Chooses the experts of each token.
            dispatch: Sends tokens to their experts and combines the outputs.
            shared: Additional feed-forward layer that every token uses (DeepSeekMoE, arXiv 2401.06066).
            shared_gate: Projection to one number per token. Its sigmoid multiplies the output of `shared` (Qwen2-MoE). None
                does not scale it.
            gate: Gate projection of one expert, `down(activation(gate(x)) * up(x))`. If None, an expert computes
                `down(activation(up(x)))`.
            up: Up projection of one expert; each expert gets its own copy.
            down: Down projection of one expert; each expert gets its own copy.
        """

        input_dim: int = interface(default=REQUIRED)
        num_experts: int = setting(default=8, ge=1, le=2**16)
        top_k: int = setting(default=2, ge=1)
        hidden_dim: int | Node[int] = Scaled(factor=8 / 3, multiple_of=128)
        activation: Activation | Node[ActivationFunction] = "silu"
        form: Node[GatedForm] | None = setting(default=None, hide_default=True)
        weigh_inputs: bool = setting(default=False, hide_default=True)
        norm: Node[Norm] | None = setting(default=None, hide_default=True)
        router: Node[Router] = SoftmaxRouter.Config()
        dispatch: Node[Dispatch] = DroplessDispatch.Config()
        shared: Node[FeedForward] | None = None
        shared_gate: Node[Projection] | None = setting(default=None, hide_default=True)
        gate: Node[ExpertProjection] | None = Linear.Config()
        up: Node[ExpertProjection] = Linear.Config()
        down: Node[ExpertProjection] = Linear.Config()

        def validate(self) -> Iterable[Problem]:
            """Check that `top_k` is at most `num_experts`, and that `form` and `shared_gate` have something to act on."""
            yield from super().validate()
            if self.top_k > self.num_experts:
                yield Problem(
                    path="top_k",
                    message="a token cannot use more experts than there are",
                    got=f"top_k={self.top_k} of num_experts={self.num_experts}",
                    expected=f"at most {self.num_experts}",
                    fix="lower top_k or raise num_experts",
                )
            if self.form is not None and self.gate is None:
                yield Problem(path="form", message="requires a gate projection", fix="set gate, or leave form out")
            if self.shared_gate is not None and self.shared is None:
                yield Problem(path="shared_gate", message="requires shared", fix="set shared, or leave shared_gate out")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        hidden = size_of(cfg.hidden_dim, cfg.input_dim)
        sizes = {"input_dim": cfg.input_dim, "num_experts": cfg.num_experts, "top_k": cfg.top_k}
        is_invariant = isinstance(cfg.dispatch, DroplessDispatch.Config) and cfg.dispatch.kernel == KERNEL
        self.router = self.child(cfg.router, rngs=rngs, batch_invariant=is_invariant, **sizes)
        width, hidden = (cfg.input_dim,), (size_of(cfg.hidden_dim, cfg.input_dim),)

        def build_maps(cfg_map: Any, source: tuple[int, ...], target: tuple[int, ...], *axes: str) -> Any:
            offered = {"input_dims": source, "output_dims": target, "axes": axes, "precision": self.precision}
            return build_stacked(cfg_map, cfg.num_experts, rngs=rngs, **offered)

        self.gate = None if cfg.gate is None else build_maps(cfg.gate, width, hidden, "embed", "mlp")
        self.up = build_maps(cfg.up, width, hidden, "embed", "mlp")
        self.down = build_maps(cfg.down, hidden, width, "mlp", "embed")
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)
        if cfg.shared is not None:
            self.shared = self.child(cfg.shared, rngs=rngs, input_dim=cfg.input_dim)
        if cfg.shared_gate is not None:
            sizes = {"input_dims": width, "output_dims": (1,), "axes": ("embed", None)}
            self.shared_gate = self.child(cfg.shared_gate, rngs=rngs, **sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the experts: [B, S, D] -> [B, S, D]."""
        cfg = self.cfg
        x = x.astype(self.precision.compute)
        experts = Experts(self.gate, self.up, self.down, cfg.num_experts, cfg.activation, cfg.form, cfg.weigh_inputs)
        with module_scope(self):
            routing = self.router(x)
            self._report(routing, x.shape[1])
            y = cfg.dispatch.build()(x if cfg.norm is None else self.norm(x), routing, experts)
        return tag(y if cfg.shared is None else y + self._shared(x), "mlp_out")

    def _shared(self, x: jax.Array) -> jax.Array:
        """Apply the shared expert, scaled by its gate: [B, S, D] -> [B, S, D]."""
        y = self.shared(x)
        return y if self.cfg.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * y

    def _report(self, routing: Routing, length: int) -> None:
        """Add summaries of the expert load.

        With an even load, the entropy and the maximum load are both 1.
        """
        expert, num_experts = routing.expert, self.cfg.num_experts
        counted = assignment_mask(expert, length, routing.token)
        share = jnp.sum(count_assignments(expert, num_experts, counted), axis=0) / expert.size
        weight = jnp.float32(expert.size)
        if counted is not None:
            share, weight = share * padding.correction(counted), jnp.sum(counted, dtype=jnp.float32)

        def over_assignments(value: jax.Array) -> Summary:
            return Summary(value, weight, "mean", "assignments")

        add_summary("expert_load_max", over_assignments(jnp.max(share) * num_experts))
        if num_experts > 1:
            entropy = -jnp.sum(share * jnp.log(jnp.maximum(share, 1e-9)))
            add_summary("expert_load_entropy", over_assignments(entropy / jnp.log(jnp.float32(num_experts))))
