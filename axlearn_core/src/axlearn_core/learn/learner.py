"""Gradients to new parameters: clipping, an optax optimizer, rules by parameter path, average, non-finite steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.contracts.capabilities import learning_rate_of
from axlearn_core.contracts.parts import Loss
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.kernels.selection import in_force
from axlearn_core.learn.accumulate import value_and_grad
from axlearn_core.learn.optimizers import AdamW, Axes, EvaluatesWith, Optimizer, rate_of
from axlearn_core.learn.paths import fitting, flatten, select, unflatten


@node
class ParameterRule(Node[None]):
    """What is different for the parameters whose dotted path fits `pattern` (`decoder.**.norm.*`).

    Where several rules fit a parameter, scales multiply, and any of them can exempt it from decay or freeze it.

    Attributes:
        pattern: `*` stands for one part of the path, `**` for any number; a leading `!` means all others (`!**.lora_*`).
        learning_rate_scale: multiplies the updates.
        weight_decay: False exempts from weight decay.
        freeze: True leaves the parameters as they are; they take no optimizer state. Variables that training changes by
            rules of their own (the bias of a balancing router) stay too.
        optimizer: updates these parameters instead of the learner's. The learner's clipping neither counts nor scales
            their gradients.
        max_grad_norm: clips the gradients of `optimizer`, all parameters that it updates together, to this norm.
    """

    pattern: str = REQUIRED
    learning_rate_scale: float = setting(default=1.0, ge=0)
    weight_decay: bool = True
    freeze: bool = False
    optimizer: Node[Optimizer] | None = None
    max_grad_norm: float | None = setting(default=None, hide_default=True, gt=0)

    def validate(self) -> Iterable[Problem]:
        """A norm to clip to, and no optimizer whose gradients it would clip."""
        if self.max_grad_norm is not None and self.optimizer is None:
            yield Problem(
                path="max_grad_norm",
                message="clips the gradients of the rule's own optimizer, and the rule has none",
                got=str(self.max_grad_norm),
                fix="give the rule an optimizer, or set learner.max_grad_norm",
            )


class LearnerState(NamedTuple):
    """What is kept between updates.

    Attributes:
        optimizer: optax's state; parameters in it are a dict by dotted path, without the frozen ones.
        ema: float32 moving average of the trained parameters by dotted path, or None.
        updates: int32, how many updates were made.
        skipped: int32, how many were skipped because a gradient or the loss was not finite.
        skipped_in_a_row: int32, how many of those since the last update.
    """

    optimizer: Any
    ema: dict[str, jax.Array] | None
    updates: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


class Learner(Configurable):
    """The shipped learner; see `axlearn_core.contracts.parts.Learner`.

    Works on any pytree of parameters: a dict by dotted path, nested dicts, an `nnx.State`. One norm of the gradients
    serves the clipping, the summary and the test for non-finite gradients. Parameters that a rule's own optimizer updates
    have a norm of their own.
    """

    @node
    class Config(Configurable.Config["Learner"]):
        """The fields of `Learner`.

        Attributes:
            optimizer: a node that builds an optax transformation.
            max_grad_norm: clips the gradients that `optimizer` gets to this global norm; None leaves them.
            accumulate_steps: in how many microbatches the batch of a step is taken. They have one mean gradient, unless
                the model draws random numbers or computes over its batch.
            ema_decay: keeps a moving average of the parameters, which evaluation uses; None keeps none.
            rules: what is different for some of the parameters.
        """

        optimizer: Node[Optimizer] = AdamW()
        max_grad_norm: float | None = setting(default=1.0, gt=0)
        accumulate_steps: int = setting(default=1, kind="microbatches", ge=1)
        ema_decay: float | None = setting(default=None, gt=0, lt=1)
        rules: tuple[ParameterRule, ...] = ()

    def __init__(self, cfg: Config, *, max_steps: int, axes: Axes | None = None):
        """`axes`: dotted path -> logical axis names of each parameter, for optimizers that go by them."""
        self.cfg, self.max_steps, self._axes = cfg, max_steps, axes or {}
        rate = learning_rate_of(cfg.optimizer)  # for the summary only
        self._rate = None if rate is None or callable(rate) else rate_of(rate, max_steps)

    def init(self, params: object) -> LearnerState:
        """The state for a pytree of parameters.

        Raises:
            RequestError: a rule fits no parameter.
            ConfigError: the rules leave nothing to train, or exempt from a weight decay that the optimizer cannot mask; an
                optimizer says what to evaluate with, and the learner keeps an average or scales its updates.
        """
        plan = self._plan(params)
        self._check_evaluation(plan)
        trained = plan.trained(flatten(params))
        optimizer = plan.optimizer.init(trained)
        if plan.exempt and not plan.masks:
            raise ConfigError(
                Problem(
                    path="learner.rules",
                    message="the optimizer has no weight-decay mask, so no parameter can be exempted from its decay",
                    got=f"weight_decay=False for {plan.exempt[0]}"
                    + (f" and {len(plan.exempt) - 1} more" if len(plan.exempt) > 1 else ""),
                    fix="take an optimizer that has one (adamw, muon, lion), or leave weight_decay out of the rules",
                )
            )
        # Copies, because an average that shares its buffers with the parameters could not be donated with them.
        average = {p: jnp.array(x, jnp.float32, copy=True) for p, x in trained.items()} if self.cfg.ema_decay else None
        return LearnerState(optimizer, average, *(jnp.zeros((), jnp.int32) for _ in range(3)))

    def value_and_grad(
        self, loss: Loss, params: object, variables: object, batch: object, key: jax.Array | None = None
    ) -> Any:
        """`((mean loss, summaries, variables), grads)` in `accumulate_steps` microbatches; see `learn.value_and_grad`."""
        return value_and_grad(loss, params, variables, batch, key, self.cfg.accumulate_steps)

    def update(
        self, grads: object, state: LearnerState, params: object, loss: jax.Array
    ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
        """(new params, new state, scalar summaries: `grad_norm` before clipping, `learning_rate`, `skipped_steps`, `skipped`).

        Where the loss or a gradient is not finite, parameters, moments and average stay as they are and the step counts
        as skipped.
        """
        plan = self._plan(params)
        old, grads = plan.trained(flatten(params)), plan.trained(flatten(grads))
        norm = global_norm({p: g for p, g in grads.items() if p not in plan.own})
        finite = jnp.isfinite(norm) & jnp.isfinite(loss) & jnp.isfinite(global_norm({p: grads[p] for p in plan.own}))

        def step(old: Any, optimizer: Any, average: Any, grads: Any) -> tuple[Any, Any, Any]:
            if self.cfg.max_grad_norm is not None:
                grads = grads | _clip(
                    {p: g for p, g in grads.items() if p not in plan.own}, norm, self.cfg.max_grad_norm
                )
            for paths, limit in plan.own_limits(self.cfg.rules):
                group = {p: grads[p] for p in paths}
                grads = grads | _clip(group, global_norm(group), limit)
            updates, optimizer = plan.optimizer.update(grads, optimizer, old, value=loss)
            new = optax.apply_updates(
                old, {p: u * plan.scales[p] if p in plan.scales else u for p, u in updates.items()}
            )
            return new, optimizer, self._update_average(average, new)

        with jax.numpy_dtype_promotion("standard"):  # optax raises its decays to integer powers
            new, optimizer, average = _step_if(finite, step, (old, state.optimizer, state.ema), grads)
            rate = self._rate(state.updates) if callable(self._rate) else self._rate
        skipped = (~finite).astype(jnp.int32)
        new_state = LearnerState(
            optimizer=optimizer,
            ema=average,
            updates=state.updates + 1 - skipped,
            skipped=state.skipped + skipped,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
        )
        summaries = {"grad_norm": norm, "skipped_steps": new_state.skipped, "skipped": ~finite}
        if rate is not None:
            summaries["learning_rate"] = jnp.asarray(rate, jnp.float32)
        return unflatten(params, new), new_state, summaries

    def frozen_variables(self, paths: Iterable[str]) -> list[str]:
        """Those that a freezing rule fits; see `axlearn_core.contracts.capabilities.FreezesVariables`."""
        paths = list(paths)
        frozen = {p for rule in self.cfg.rules if rule.freeze for p in fitting(rule.pattern, paths)}
        return [path for path in paths if path in frozen]

    def evaluation_params(self, state: LearnerState, params: object) -> Any:
        """The moving average in the parameters' own dtypes, where one is kept; what their optimizers say; or the parameters."""
        flat = flatten(params)
        if state.ema is not None:
            return unflatten(params, {p: a.astype(flat[p].dtype) for p, a in state.ema.items()})
        if not any(isinstance(r, EvaluatesWith) for r in (self.cfg.optimizer, *(r.optimizer for r in self.cfg.rules))):
            return params
        plan, evaluated = self._plan(params), {}
        for optimizer, label, paths in self._evaluation_optimizers(plan):
            own = state.optimizer.inner_states[label].inner_state if plan.own else state.optimizer
            group = {p: flat[p] if p in paths else optax.MaskedNode() for p in plan.names}
            with jax.numpy_dtype_promotion("standard"):
                averaged = optimizer.evaluation_params(own, group)
            evaluated |= {p: averaged[p].astype(flat[p].dtype) for p in paths}
        return unflatten(params, evaluated)

    def _evaluation_optimizers(self, plan: "_Plan") -> Iterator[tuple[EvaluatesWith, str, list[str]]]:
        """(optimizer, its label, its parameters) of each optimizer that says what to evaluate with."""
        for label in ("", *sorted(set(plan.own.values()))):
            optimizer = self.cfg.rules[int(label)].optimizer if label else self.cfg.optimizer
            paths = [p for p in plan.names if plan.own.get(p, "") == label]
            if isinstance(optimizer, EvaluatesWith) and paths:
                yield optimizer, label, paths

    def _check_evaluation(self, plan: "_Plan") -> None:
        for optimizer, label, paths in self._evaluation_optimizers(plan):
            path = f"learner.rules.{label}.optimizer" if label else "learner.optimizer"
            kind = type(optimizer).__qualname__
            if self.cfg.ema_decay is not None:
                raise ConfigError(
                    Problem(
                        path="learner.ema_decay",
                        message=f"{path} ({kind}) keeps an average of its own, which evaluation uses",
                        got=str(self.cfg.ema_decay),
                        expected="null",
                    )
                )
            if scaled := [p for p in paths if p in plan.scales]:
                raise ConfigError(
                    Problem(
                        path="learner.rules",
                        message=f"{path} ({kind}) keeps an average that scaled updates would not follow",
                        got=f"a learning_rate_scale for {scaled[0]}",
                        fix="give those parameters an optimizer of their own, with another learning rate",
                    )
                )

    def _update_average(self, average: dict[str, jax.Array] | None, new: Any) -> dict[str, jax.Array] | None:
        decay = self.cfg.ema_decay
        if average is None or decay is None:
            return average
        return {p: decay * a + (1 - decay) * new[p].astype(a.dtype) for p, a in average.items()}

    def _plan(self, params: object) -> "_Plan":
        """Everything about these parameters that does not depend on their values; made anew for each trace."""
        flat = flatten(params)
        scales: dict[str, float] = {}
        exempt: set[str] = set()
        frozen: set[str] = set()
        own: dict[str, str] = {}
        rules = self.cfg.rules
        for i, rule in enumerate(rules):
            paths = select(rule.pattern, flat, setting=f"learner.rules.{i}.pattern")
            scales |= {p: scales.get(p, 1.0) * rule.learning_rate_scale for p in paths}
            exempt |= set() if rule.weight_decay else set(paths)
            frozen |= set(paths) if rule.freeze else set()
            own |= dict.fromkeys(paths, str(i)) if rule.optimizer is not None else {}
        names = [p for p in flat if p not in frozen]
        if not names:
            raise ConfigError(
                Problem(path="learner.rules", message="every parameter is frozen: nothing is left to train")
            )
        plan = _Plan(names, [p for p in names if p in exempt], {p: s for p, s in scales.items() if s != 1.0})
        mask = {"mask": plan.mask, "weight_decay_mask": plan.mask} if plan.exempt else {}
        plan.own = {p: i for p, i in own.items() if p not in frozen}

        def built(optimizer: Node[Optimizer], label: str) -> Optimizer:
            axes = {p: self._axes.get(p) for p in names if plan.own.get(p, "") == label}
            transformation = optimizer.build(max_steps=self.max_steps, axes=axes, **mask)
            if not isinstance(transformation, optax.GradientTransformation):
                path = f"learner.rules.{label}.optimizer" if label else "learner.optimizer"
                raise ConfigError(_no_optimizer(path, transformation))
            return optax.with_extra_args_support(transformation)

        plan.optimizer = built(self.cfg.optimizer, "")
        if plan.own:
            optimizers = {i: built(rules[int(i)].optimizer, i) for i in sorted(set(plan.own.values()))}  # type: ignore[arg-type]
            plan.optimizer = optax.partition(
                {"": plan.optimizer, **optimizers}, {p: plan.own.get(p, "") for p in names}
            )
        return plan


def _no_optimizer(path: str, value: object) -> Problem:
    cls = type(value)
    return Problem(
        path=path,
        message="builds no optimizer",
        got=f"{cls.__module__}.{cls.__qualname__}",
        expected="an optax.GradientTransformation",
    )


class _Plan:
    optimizer: Any

    def __init__(self, names: list[str], exempt: list[str], scales: dict[str, float]):
        self.names, self.exempt, self.scales = names, exempt, scales
        self.own: dict[str, str] = {}  # path -> index of the rule whose optimizer updates it
        self.masks = False  # whether the optimizer asked for the mask

    def own_limits(self, rules: tuple[ParameterRule, ...]) -> Iterator[tuple[list[str], float]]:
        """(paths, norm to clip to) of each rule's optimizer whose gradients are clipped."""
        for label in sorted(set(self.own.values())):
            if (limit := rules[int(label)].max_grad_norm) is not None:
                yield [p for p, own in self.own.items() if own == label], limit

    def trained(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        return {p: flat[p] for p in self.names}

    def mask(self, params: Mapping[str, Any]) -> dict[str, bool]:
        self.masks = True
        return {p: p not in self.exempt for p in params}


def _step_if(finite: jax.Array, step: Callable[..., Any], before: tuple[Any, ...], grads: object) -> Any:
    """`step(*before, grads)` where `finite`, else `before`.

    On CPUs a conditional updates in place, and a select would keep copies of the old state. On GPUs it is the conditional that
    copies the state, whole; a select is fused into the update, and on TPUs takes no more than a conditional.
    """
    selection = in_force()
    platform = jax.default_backend() if selection is None else selection.platform
    if platform in ("gpu", "tpu"):
        return jax.tree.map(lambda new, old: jax.lax.select(finite, new, old), step(*before, grads), before)
    return jax.lax.cond(finite, step, lambda *operands: operands[:-1], *before, grads)


def global_norm(tree: object) -> jax.Array:
    """The root of the sum of squares of all leaves, in float32."""
    squares = (jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _clip(grads: object, norm: jax.Array, limit: float) -> Any:
    # As optax.clip_by_global_norm, but by one scale for all, which XLA fuses into the optimizer instead of storing
    # clipped gradients.
    scale = jnp.where(norm < limit, jnp.ones_like(norm), limit / norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
