"""Routers: softmax top-k, sigmoid balanced by a bias, expert choice."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.initializers import Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_core.nn.summaries import add_loss, add_summary, mean_over_tokens
from axlearn_core.nn.variables import LearnedVariable, StepTotal
from axlearn_plugins_moe.routing import Routing, by_choice, counts, load_balance_loss, of_tokens, z_loss

T_co = TypeVar("T_co", covariant=True)

BALANCES = "balances its load over the batch"


class LinearRouter(Layer):
    """The base of these routers: one logit per token and expert, computed in float32 regardless of the dtype of the model."""

    @node
    class Config(Layer.Config[T_co]):
        """`init` starts small, so that routing starts even (Fedus et al., 2021). `z_loss` weighs log(Z)^2."""

        input_dim: int = interface(default=REQUIRED)
        num_experts: int = interface(default=REQUIRED)
        top_k: int = interface(default=REQUIRED)
        z_loss: float = setting(default=0.0, ge=0, kind="training")
        init: Node[Initializer] = setting(default=VarianceScaling(scale=0.1), kind="training")

    def __init__(self, cfg: Config[Any], *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.input_dim, cfg.num_experts), ("embed", "experts"))

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, S, D] -> float32 [B, S, E]; adds the z-loss."""
        x, weight = x.astype(jnp.float32), self.weight[...].astype(jnp.float32)
        logits = lax.dot_general(x, weight, (((2,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
        logits = tag(constrain(logits, "batch", "sequence", None), "router_logits")
        if self.cfg.z_loss:
            add_loss("router_z_loss", self.cfg.z_loss * z_loss(logits))
        return logits


def check_groups(kind: str, cfg: Any) -> None:
    """Raises `RequestError` for groups of experts that a router cannot use."""
    size, rest = divmod(cfg.num_experts, cfg.num_groups)
    if rest or cfg.top_groups > cfg.num_groups or cfg.top_groups * size < cfg.top_k:
        raise RequestError(
            f"{kind} router: experts have to form equal groups, and the groups of a token have to hold its experts\n"
            f"    got: num_experts={cfg.num_experts}, top_k={cfg.top_k}, num_groups={cfg.num_groups}, "
            f"top_groups={cfg.top_groups}\n    fix: set num_groups to a divisor of num_experts, or top_groups higher"
        )


def allowed(scores: jax.Array, num_groups: int, top_groups: int, *, judges: int) -> jax.Array:
    """[B, S, E] with -inf for the experts in groups that the token does not use.

    It uses the groups with the largest sum of their `judges` best scores.
    """
    if top_groups == num_groups:
        return scores
    grouped = scores.reshape(*scores.shape[:2], num_groups, -1)
    best = jnp.sum(lax.top_k(grouped, min(judges, grouped.shape[-1]))[0], axis=-1)
    used = jnp.sum(jax.nn.one_hot(lax.top_k(best, top_groups)[1], num_groups), axis=-2) > 0
    return jnp.where(used[..., None], grouped, -jnp.inf).reshape(scores.shape)


class SoftmaxRouter(LinearRouter):
    """Each token takes the `top_k` experts with the largest softmax probability (Shazeer et al., 2017)."""

    @node
    class Config(LinearRouter.Config["SoftmaxRouter"]):
        """How the weights are made, and the auxiliary losses.

        Attributes:
            normalize: the weights of a token's experts are divided by their sum (Mixtral); otherwise they are the
                probabilities (Switch). None normalises where a token has more than one expert: the weight of a single
                one would be 1, and the router would learn nothing.
            scale: multiplies the weights after that (the routed scaling factor of DeepSeek-V2, arXiv 2405.04434).
            num_groups: experts form so many groups of neighbours, of which a token uses `top_groups`: those with the
                largest probability of one expert (device-limited routing, section 2.2.2 there).
            load_balance: weight of the load-balance loss (Fedus et al., 2021), over all tokens of the batch.
            z_loss: weight of log(Z)^2 (Zoph et al., 2022).
        """

        normalize: bool | None = None
        scale: float = setting(default=1.0, gt=0)
        num_groups: int = setting(default=1, ge=1)
        top_groups: int = setting(default=1, ge=1)
        load_balance: float = setting(default=0.01, ge=0, kind="training")
        z_loss: float = setting(default=0.001, ge=0, kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        check_groups("softmax", cfg)
        if cfg.load_balance:
            self.batch_dependence = BALANCES

    def __call__(self, x: jax.Array) -> Routing:
        """[B, S, D] -> the assignments."""
        cfg = self.cfg
        probabilities = jax.nn.softmax(self.logits(x), axis=-1)
        weight, expert = lax.top_k(allowed(probabilities, cfg.num_groups, cfg.top_groups, judges=1), cfg.top_k)
        if cfg.top_k > 1 if cfg.normalize is None else cfg.normalize:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        expert = by_choice(expert)
        if cfg.load_balance:
            add_loss("load_balance", cfg.load_balance * load_balance_loss(expert, probabilities))
        return Routing(expert, cfg.scale * by_choice(weight))


class BalancingBias(LearnedVariable):
    """A bias per expert that a router selects by, and moves to balance its load."""


class SigmoidRouter(LinearRouter):
    """Sigmoid scores, balanced by a bias per expert instead of a loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    The experts with the largest `score + bias` are selected; their weights are made of the scores alone. The bias is a
    variable, not a parameter: at the end of each training step the router lowers it by `rate` for experts with more than the
    mean load of the step, and raises it for those with less. The load counts the tokens of all microbatches and devices, and
    no padding. In evaluation the bias is only read. So a step in microbatches computes what a whole one does.
    """

    @node
    class Config(LinearRouter.Config["SigmoidRouter"]):
        """How experts are selected and weighed.

        Attributes:
            normalize: the weights of a token's experts are divided by their sum.
            scale: multiplies the weights after that (the routed scaling factor; 2.5 in DeepSeek-V3).
            num_groups: experts form so many groups of neighbours, of which a token uses `top_groups`: those with the
                largest sum of their two best scores (node-limited routing).
            load_balance: weight of the sequence-wise balance loss (1e-4 in DeepSeek-V3); 0 leaves it out.
            rate: how far the bias moves in a step. 1e-3 is the bias update speed of DeepSeek-V3 (section 4.2); 0 keeps it.
        """

        normalize: bool = True
        scale: float = setting(default=1.0, gt=0)
        num_groups: int = setting(default=1, ge=1)
        top_groups: int = setting(default=1, ge=1)
        load_balance: float = setting(default=0.0, ge=0, kind="training")
        rate: float = setting(default=1e-3, ge=0, kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        check_groups("sigmoid", cfg)
        rngs.params()  # was drawn for the bias when it was a parameter: experts are initialised as they were then
        zeros = jnp.zeros(cfg.num_experts, jnp.float32)
        self.bias = BalancingBias(zeros, out_sharding=("experts",), eager_sharding=False)
        self.load = StepTotal(zeros, out_sharding=("experts",), eager_sharding=False)
        self.use_running_average = False  # flax sets it in evaluation

    def __call__(self, x: jax.Array) -> Routing:
        """[B, S, D] -> the assignments."""
        cfg = self.cfg
        scores = jax.nn.sigmoid(self.logits(x))
        bias = self.bias[...][None, None]
        expert = lax.top_k(allowed(scores + bias, cfg.num_groups, cfg.top_groups, judges=2), cfg.top_k)[1]
        weight = jnp.take_along_axis(scores, expert, axis=-1)
        if cfg.normalize:
            weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
        expert = by_choice(expert)
        if not self.use_running_average:
            self.load[...] += jnp.sum(counts(expert, cfg.num_experts, of_tokens(expert, x.shape[1])), axis=0)
        if cfg.load_balance:
            shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
            add_loss("load_balance", cfg.load_balance * load_balance_loss(expert, shares, per_row=True))
        return Routing(expert, cfg.scale * by_choice(weight))

    def end_step(self) -> None:
        """Moves the bias against the load [..., E] of the step."""
        load = self.load[...]
        self.bias[...] -= self.cfg.rate * jnp.sign(load - jnp.mean(load, axis=-1, keepdims=True))


class ExpertChoiceRouter(LinearRouter):
    """Each expert takes the tokens of a row that it likes best (Zhou et al., 2022), so that the load is even by design.

    An expert takes `S * top_k / num_experts` tokens of a row of S, rounded up; a token may get any number of experts,
    or none. **Not causal**: whether a token is taken depends on the tokens after it, in training as in evaluation. So a
    language model sees a little of the future there, which it does not have when it generates: there a row of one token
    takes its `top_k` likeliest experts, and a prompt is shared out among the experts with its padding.
    """

    @node
    class Config(LinearRouter.Config["ExpertChoiceRouter"]):
        """`z_loss` weighs log(Z)^2; there is nothing to balance."""

    def __call__(self, x: jax.Array) -> Routing:
        """[B, S, D] -> the assignments."""
        cfg, length = self.cfg, x.shape[1]
        probabilities = jax.nn.softmax(self.logits(x), axis=-1)
        if length == 1:
            weight, expert = lax.top_k(probabilities, cfg.top_k)
            return Routing(by_choice(expert), by_choice(weight))
        capacity = min(length, -(-length * cfg.top_k // cfg.num_experts))
        weight, token = lax.top_k(jnp.swapaxes(probabilities, 1, 2), capacity)  # [B, E, C]
        expert = lax.broadcasted_iota(jnp.int32, token.shape, 1)
        weight, token, expert = (a.reshape(a.shape[0], -1) for a in (weight, token, expert))
        has_expert = jnp.sum(jax.nn.one_hot(token, length), axis=1) > 0
        add_summary("tokens_without_expert", mean_over_tokens(1 - has_expert.astype(jnp.float32)))
        return Routing(expert, weight, token)
