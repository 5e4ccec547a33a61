"""Routers: softmax top-k, sigmoid with a balancing bias, and expert choice. Their score function is a slot."""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, factor_of, interface, node, setting
from axlearn_core.config.roles import CompetingTokensRole, FullPrecisionRole
from axlearn_core.contracts.arrays import is_array
from axlearn_core.errors import RequestError
from axlearn_core.nn import padding
from axlearn_core.nn.initializers import Constant, Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_core.nn.summaries import add_loss, add_summary, mean_over_tokens
from axlearn_core.nn.variables import LearnedVariable, StepTotal
from axlearn_plugins_moe.replay import replay_choice
from axlearn_plugins_moe.routing import (
    Routing,
    assignment_mask,
    count_assignments,
    flatten_choices,
    load_balance_loss,
    z_loss,
)
from axlearn_plugins_transformer.kernels.gated_linear_unit import build_function
from axlearn_plugins_transformer.norm import Norm

T_co = TypeVar("T_co", covariant=True)

BALANCES = "balances its load over the batch"

INVARIANT_OUTPUTS = 16
"""Minimum number of logits in a batch-invariant matmul. XLA for CPU computes 8 or fewer outputs with a different algorithm if there
are fewer than 96 tokens."""


class ScoreFunction(Protocol):
    """Scores the experts of a token. Its node builds it without arguments."""

    def __call__(self, logits: jax.Array, /) -> jax.Array:
        """Score the experts, float32 [B, S, E] -> float32 [B, S, E].

        A router chooses the experts with the largest scores and uses the scores as weights, so they must be positive.
        """
        ...


@node
class SoftmaxScore(Node[ScoreFunction]):
    """Softmax over all experts. With `normalize`, the weights are a softmax over the logits of the chosen experts."""

    def build(self, **_: Any) -> ScoreFunction:
        """Return the function."""
        return lambda logits: jax.nn.softmax(logits, axis=-1)


@node
class SigmoidScore(Node[ScoreFunction]):
    """Sigmoid of each logit."""

    def build(self, **_: Any) -> ScoreFunction:
        """Return the function."""
        return jax.nn.sigmoid


class LinearRouter(Layer):
    """Base class for the routers: computes one logit and one score per token and expert, always in float32.

    Attributes:
        default_score: Score function if the config has none. A subclass sets it.
    """

    default_score: Node[ScoreFunction] = SoftmaxScore()

    @node
    class Config(Layer.Config[T_co], FullPrecisionRole):
        """Settings that all routers share.

        Attributes:
            batch_invariant: Whether the logits of a token must not depend on the number of tokens. They are then computed with at
                least `INVARIANT_OUTPUTS` outputs.
            norm: Norm of the router's input, or None.
            logit_multiplier: Factor applied to the logits, before their bias: a number, or a node that builds one from the width
                (Gemma 4).
            logit_bias: Add a trained bias to the logits (gpt-oss).
            score: Score function. None is the one that names the router.
            z_loss: Weight of log(Z)^2.
            init: Initializer of the weight. A small scale makes the initial routing even (Fedus et al., 2021).
        """

        input_dim: int = interface(default=REQUIRED)
        num_experts: int = interface(default=REQUIRED)
        top_k: int = interface(default=REQUIRED)
        batch_invariant: bool = interface(default=False)
        norm: Node[Norm] | None = setting(default=None, hide_default=True)
        logit_multiplier: float | Node[float] = setting(default=1.0, gt=0, hide_default=True)
        logit_bias: bool = setting(default=False, hide_default=True)
        score: Node[ScoreFunction] | None = setting(default=None, hide_default=True)
        z_loss: float = setting(default=0.0, ge=0, kind="training")
        init: Node[Initializer] = setting(default=VarianceScaling(scale=0.1), kind="training")

    def __init__(self, cfg: Config[Any], *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.input_dim, cfg.num_experts), ("embed", "experts"))
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)
        if cfg.logit_bias:
            self.logit_bias = self.parameter(rngs, Constant(), (cfg.num_experts,), ("experts",))

    def logits(self, x: jax.Array) -> jax.Array:
        """Compute the logits, [B, S, D] -> float32 [B, S, E], and add the z-loss."""
        x = x if self.cfg.norm is None else self.norm(x)
        x, weight = x.astype(jnp.float32), self.weight[...].astype(jnp.float32)
        count = self.cfg.num_experts
        if self.cfg.batch_invariant:
            weight = jnp.pad(weight, ((0, 0), (0, max(0, INVARIANT_OUTPUTS - count))))
        logits = lax.dot_general(x, weight, (((2,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)[..., :count]
        multiplier = factor_of(self.cfg.logit_multiplier, width=self.cfg.input_dim)
        if multiplier != 1:
            logits = logits * multiplier
        if self.cfg.logit_bias:
            logits = logits + self.logit_bias[...].astype(jnp.float32)[None, None]
        logits = tag(constrain(logits, "batch", "sequence", None), "router_logits")
        if self.cfg.z_loss:
            add_loss("router_z_loss", self.cfg.z_loss * z_loss(logits))
        return logits

    def scores(self, logits: jax.Array) -> jax.Array:
        """Score the experts, float32 [B, S, E] -> float32 [B, S, E].

        Raises:
            RequestError: The config's score function returns another shape or dtype.
        """
        score = self._score()
        scores: Any = build_function(score, "a score function", "sigmoid-score")(logits)
        if not is_array(scores) or scores.shape != logits.shape or scores.dtype != logits.dtype:
            raise RequestError(
                f"router: the score function {type(score).__qualname__} must keep the shape and the dtype of the logits\n"
                f"    got: {jax.typeof(scores)}\n    expected: {jax.typeof(logits)}\n"
                "    fix: return one float32 score per token and expert, or leave `score` unset"
            )
        return scores

    def choose(self, scores: jax.Array) -> jax.Array:
        """Choose the experts with the largest scores, float32 [B, S, E] -> int32 [B, S, K], or those that are replayed."""
        return replay_choice(lax.top_k(scores, self.cfg.top_k)[1])

    def shares(self, scores: jax.Array) -> jax.Array:
        """Divide scores [B, S, E] by their sum over the experts, for the balance loss. Softmax scores stay as they are."""
        return scores if isinstance(self._score(), SoftmaxScore) else scores / jnp.sum(scores, axis=-1, keepdims=True)

    def _score(self) -> Node[ScoreFunction]:
        return self.default_score if self.cfg.score is None else self.cfg.score


def check_groups(kind: str, cfg: Any) -> None:
    """Raise RequestError if a router cannot use these groups of experts."""
    size, remainder = divmod(cfg.num_experts, cfg.num_groups)
    if remainder or cfg.top_groups > cfg.num_groups or cfg.top_groups * size < cfg.top_k:
        raise RequestError(
            f"{kind} router: experts must form equal groups, and a token's groups must contain enough experts\n"
            f"    got: num_experts={cfg.num_experts}, top_k={cfg.top_k}, num_groups={cfg.num_groups}, "
            f"top_groups={cfg.top_groups}\n    fix: set num_groups to a divisor of num_experts, or raise top_groups"
        )


def mask_other_groups(scores: jax.Array, num_groups: int, top_groups: int, *, judges: int) -> jax.Array:
    """Set the scores [B, S, E] of experts outside a token's groups to -inf.

    A token uses the groups whose `judges` best scores have the largest sums.
    """
    if top_groups == num_groups:
        return scores
    grouped = scores.reshape(*scores.shape[:2], num_groups, -1)
    best = jnp.sum(lax.top_k(grouped, min(judges, grouped.shape[-1]))[0], axis=-1)
    used = jnp.sum(jax.nn.one_hot(lax.top_k(best, top_groups)[1], num_groups), axis=-2) > 0
    return jnp.where(used[..., None], grouped, -jnp.inf).reshape(scores.shape)


class SoftmaxRouter(LinearRouter):
    """Each token chooses the `top_k` most probable experts by softmax, and a loss balances the load.

    See Shazeer et al., 2017. `score` replaces the softmax.
    """

    @node
    class Config(LinearRouter.Config["SoftmaxRouter"]):
        """Settings for the weights and the auxiliary losses.

        Attributes:
            normalize: Divide the weights of a token's experts by their sum (Mixtral). If False, the weights are the
                probabilities (Switch). None normalizes if a token has several experts; with one expert, the weight
                would be 1 and the router would learn nothing.
            scale: Factor applied to the weights after normalization (the routed scaling factor of DeepSeek-V2, arXiv 2405.04434).
            expert_scale: Multiply the weights by a trained factor per expert (Gemma 4).
            num_groups: Number of groups of adjacent experts (device-limited routing, section 2.2.2 of the same paper).
            top_groups: Groups per token: those whose best expert has the largest probability.
            load_balance: Weight of the load-balance loss (Fedus et al., 2021), computed over all tokens of the batch.
            z_loss: Weight of log(Z)^2 (Zoph et al., 2022).
        """

        normalize: bool | None = None
        scale: float = setting(default=1.0, gt=0)
        expert_scale: bool = setting(default=False, hide_default=True)
        num_groups: int = setting(default=1, ge=1)
        top_groups: int = setting(default=1, ge=1)
        load_balance: float = setting(default=0.01, ge=0, kind="training")
        z_loss: float = setting(default=0.001, ge=0, kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        check_groups("softmax", cfg)
        if cfg.expert_scale:
            self.expert_scale = self.parameter(rngs, Constant(value=1.0), (cfg.num_experts,), ("experts",))
        if cfg.load_balance:
            self.batch_dependence = BALANCES

    def __call__(self, x: jax.Array) -> Routing:
        """Route the tokens of [B, S, D]."""
        cfg = self.cfg
        scores = self.scores(self.logits(x))
        expert = self.choose(mask_other_groups(scores, cfg.num_groups, cfg.top_groups, judges=1))
        weight = jnp.take_along_axis(scores, expert, axis=-1)
        if cfg.top_k > 1 if cfg.normalize is None else cfg.normalize:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        if cfg.expert_scale:
            weight = weight * self.expert_scale[...].astype(jnp.float32)[expert]
        expert = flatten_choices(expert)
        if cfg.load_balance:
            add_loss("load_balance", cfg.load_balance * load_balance_loss(expert, self.shares(scores)))
        return Routing(expert, cfg.scale * flatten_choices(weight))


class BalancingBias(LearnedVariable):
    """A bias per expert for expert selection, updated to balance the load."""


class SigmoidRouter(LinearRouter):
    """Sigmoid scores with a balancing bias instead of a loss.

    See DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The router selects the experts with the largest `score + bias`; their
    weights depend on the scores alone. `score` replaces the sigmoid. The bias is a variable, not a parameter. At the end
    of each training step, the router lowers the bias of experts with more than the mean load by `rate` and raises the bias
    of experts with less. The load counts the tokens of all microbatches and devices without padding, so training with
    microbatches updates the bias as training on the whole batch does. Evaluation only reads the bias.
    """

    default_score = SigmoidScore()

    @node
    class Config(LinearRouter.Config["SigmoidRouter"]):
        """Settings for the selection, the weights and the auxiliary losses.

        Attributes:
            normalize: Divide the weights of a token's experts by their sum.
            scale: Factor applied to the weights after normalization (the routed scaling factor; 2.5 in DeepSeek-V3).
            num_groups: Number of groups of adjacent experts (node-limited routing).
            top_groups: Groups per token: those with the largest sum of their two best scores.
            load_balance: Weight of the sequence-wise balance loss (1e-4 in DeepSeek-V3). 0 disables it.
            rate: Change in the bias per step. The default is that of DeepSeek-V3 (section 4.2). 0 freezes the bias.
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
        rngs.params()  # the bias drew this key in an earlier version; still drawing it keeps the experts' initial values
        zeros = jnp.zeros(cfg.num_experts, jnp.float32)
        self.bias = BalancingBias(zeros, out_sharding=("experts",), eager_sharding=False)
        self.load = StepTotal(zeros, out_sharding=("experts",), eager_sharding=False)
        self.use_running_average = False  # flax sets this to True for evaluation

    def __call__(self, x: jax.Array) -> Routing:
        """Route the tokens of [B, S, D]."""
        cfg = self.cfg
        scores = self.scores(self.logits(x))
        bias = self.bias[...][None, None]
        expert = self.choose(mask_other_groups(scores + bias, cfg.num_groups, cfg.top_groups, judges=2))
        weight = jnp.take_along_axis(scores, expert, axis=-1)
        if cfg.normalize:
            weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
        expert = flatten_choices(expert)
        if not self.use_running_average:
            self.load[...] += jnp.sum(
                count_assignments(expert, cfg.num_experts, assignment_mask(expert, x.shape[1])), axis=0
            )
        if cfg.load_balance:
            add_loss("load_balance", cfg.load_balance * load_balance_loss(expert, self.shares(scores), per_row=True))
        return Routing(expert, cfg.scale * flatten_choices(weight))

    def end_step(self) -> None:
        """Update the bias from the load of the step, [..., E]."""
        load = self.load[...]
        self.bias[...] -= self.cfg.rate * jnp.sign(load - jnp.mean(load, axis=-1, keepdims=True))


class ExpertChoiceRouter(LinearRouter):
    """Each expert chooses its best tokens from a row, so the load is even by design.

    See Zhou et al., 2022. An expert chooses `S * top_k / num_experts` tokens of a row of S tokens, rounded up. A token can have
    any number of experts, including zero. Padding has no expert.

    **Not causal**: the experts of a token depend on later tokens, in training and in evaluation. A language model
    therefore sees some of the future, which it does not have during generation. During generation, a row of one token uses
    its `top_k` most probable experts.
    """

    @node
    class Config(LinearRouter.Config["ExpertChoiceRouter"], CompetingTokensRole):
        """Settings for the router. It needs no load-balance loss."""

    def __call__(self, x: jax.Array) -> Routing:
        """Route the tokens of [B, S, D]."""
        cfg, length = self.cfg, x.shape[1]
        scores = self.scores(self.logits(x))
        if length == 1:
            weight, expert = lax.top_k(scores, cfg.top_k)
            return Routing(flatten_choices(expert), flatten_choices(weight))
        real = padding.tokens(*x.shape[:2])
        if real is not None:
            scores = jnp.where(real[..., None], scores, -jnp.inf)
        capacity = min(length, -(-length * cfg.top_k // cfg.num_experts))
        weight, token = lax.top_k(jnp.swapaxes(scores, 1, 2), capacity)  # [B, E, C]
        if real is not None:
            weight, token = self._limit_choices(weight, token, real)
        expert = lax.broadcasted_iota(jnp.int32, token.shape, 1)
        weight, token, expert = (a.reshape(a.shape[0], -1) for a in (weight, token, expert))
        has_expert = jnp.sum(jax.nn.one_hot(token, length), axis=1) > 0
        add_summary("tokens_without_expert", mean_over_tokens(1 - has_expert.astype(jnp.float32)))
        return Routing(expert, weight, token)

    def _limit_choices(self, weight: jax.Array, token: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Limit the choices of experts [B, E, C] to the number for the tokens of a row. The others choose padding, with weight 0.

        `real` is False for padding, bool [B, S].
        """
        cfg, count = self.cfg, jnp.sum(real, axis=1, dtype=jnp.int32)
        limit = (count * cfg.top_k + cfg.num_experts - 1) // cfg.num_experts
        chosen = jnp.arange(weight.shape[2], dtype=jnp.int32)[None, None] < limit[:, None, None]
        first_padding = jnp.argmin(real, axis=1).astype(token.dtype)
        return jnp.where(chosen, weight, 0), jnp.where(chosen, token, first_padding[:, None, None])
