"""`Learner`: updates parameters with an optax optimizer, gradient clipping, parameter rules, and an optional EMA."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.contracts.capabilities import get_learning_rate
from axlearn_core.contracts.parts import Loss
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.kernels.selection import get_active_selection
from axlearn_core.learn.accumulate import value_and_grad
from axlearn_core.learn.optimizers import AdamW, Axes, EvaluatesWith, Optimizer, convert_learning_rate
from axlearn_core.learn.paths import flatten, match_paths, select, unflatten


@node
class ParameterRule(Node[None]):
    """Settings for the parameters whose dotted path matches `pattern` (`decoder.**.norm.*`).

    If several rules match a parameter, their scales are multiplied. The parameter is frozen, or
    excluded from weight decay, if any of these rules says so.

    Attributes:
        pattern: Pattern in which `*` matches one part of a path and `**` matches any number of parts. `|` separates
            alternatives. A leading `!` inverts the match (`!**.lora_*|objective.**`).
        learning_rate_scale: Factor for the updates.
        weight_decay: Set to False to disable weight decay.
        freeze: Set to True to keep the parameters constant and allocate no optimizer state for them. This also freezes
            variables that training updates without gradients, such as router biases.
        optimizer: Optimizer for these parameters, instead of the learner's. Their gradients are excluded from the
            learner's clipping.
        max_grad_norm: Maximum norm of the gradients of `optimizer`, computed across all its parameters.
    """

    pattern: str = REQUIRED
    learning_rate_scale: float = setting(default=1.0, ge=0)
    weight_decay: bool = True
    freeze: bool = False
    optimizer: Node[Optimizer] | None = None
    max_grad_norm: float | None = setting(default=None, hide_default=True, gt=0)

    def validate(self) -> Iterable[Problem]:
        """Check that `max_grad_norm` is set only together with `optimizer`."""
        if self.max_grad_norm is not None and self.optimizer is None:
            yield Problem(
                path="max_grad_norm",
                message="clips the gradients of the rule's optimizer, but the rule has no optimizer",
                got=str(self.max_grad_norm),
                fix="give the rule an optimizer, or set learner.max_grad_norm",
            )

    def scale_updates(
        self, params: Mapping[str, Any], axes: Axes, optimizers: Mapping[str, Node[Optimizer]]
    ) -> dict[str, float]:
        """Return the factors for the updates by path. A subclass may compute them.

        Args:
            params: Arrays, or their shapes, of the parameters that match the pattern, by path.
            axes: Logical axis names of the parameters by path.
            optimizers: Optimizers of the parameters by path.
        """
        return dict.fromkeys(params, self.learning_rate_scale)


class LearnerState(NamedTuple):
    """State of a learner.

    Attributes:
        optimizer: State of the optax optimizer. It represents parameters as a dict keyed by dotted path, without frozen parameters.
        ema: Float32 moving average of the trained parameters keyed by dotted path, or None.
        updates: int32, number of updates.
        skipped: int32, number of updates that were skipped because a gradient or the loss was not finite.
        skipped_in_a_row: int32, number of updates skipped since the last successful one.
    """

    optimizer: Any
    ema: dict[str, jax.Array] | None
    updates: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


class Learner(Configurable):
    """The default learner. Implements `axlearn_core.contracts.parts.Learner`.

    It supports any pytree of parameters: a dict keyed by dotted path, nested dicts, or an `nnx.State`. One global gradient norm
    is used for clipping, logging, and detecting non-finite gradients. Parameters with a separate optimizer have a
    separate norm.
    """

    @node
    class Config(Configurable.Config["Learner"]):
        """Settings for `Learner`.

        Attributes:
            optimizer: Node that builds an optax transformation.
            max_grad_norm: Maximum global norm of the gradients, or None to disable clipping.
            accumulate_steps: Number of microbatches per step. The mean gradient does not depend on it, unless the model
                draws random numbers or normalizes over its batch.
            ema_decay: Decay rate of the moving average of the parameters, which evaluation uses. None disables the average.
            rules: Settings for subsets of the parameters.
        """

        optimizer: Node[Optimizer] = AdamW()
        max_grad_norm: float | None = setting(default=1.0, gt=0)
        accumulate_steps: int = setting(default=1, kind="microbatches", ge=1)
        ema_decay: float | None = setting(default=None, gt=0, lt=1)
        rules: tuple[ParameterRule, ...] = ()

    def __init__(self, cfg: Config, *, max_steps: int, axes: Axes | None = None):
        """Create a learner for `max_steps` updates. `axes` maps parameter paths to logical axis names."""
        self.cfg, self.max_steps, self._axes = cfg, max_steps, axes or {}
        rate = get_learning_rate(cfg.optimizer)  # only for logging
        self._rate = None if rate is None or callable(rate) else convert_learning_rate(rate, max_steps)

    def init(self, params: object) -> LearnerState:
        """Return the initial state for a pytree of parameters.

        Raises:
            RequestError: If a rule matches no parameter.
            ConfigError: If all parameters are frozen, if a rule disables weight decay but the optimizer has no mask, or if the
                optimizer provides evaluation parameters but the learner has an EMA or scales the optimizer's updates.
        """
        plan = self._plan(params)
        self._check_evaluation(plan)
        trained = plan.trained(flatten(params))
        optimizer = plan.optimizer.init(trained)
        if plan.exempt and not plan.masks:
            raise ConfigError(
                Problem(
                    path="learner.rules",
                    message="the optimizer has no weight-decay mask, so rules cannot disable weight decay",
                    got=f"weight_decay=False for {plan.exempt[0]}"
                    + (f" and {len(plan.exempt) - 1} more" if len(plan.exempt) > 1 else ""),
                    fix="use an optimizer with a mask (adamw, muon, lion), or remove weight_decay from the rules",
                )
            )
        # Copy: donation requires that the average and the parameters have separate buffers.
        average = {p: jnp.array(x, jnp.float32, copy=True) for p, x in trained.items()} if self.cfg.ema_decay else None
        return LearnerState(optimizer, average, *(jnp.zeros((), jnp.int32) for _ in range(3)))

    def value_and_grad(
        self, loss: Loss, params: object, variables: object, batch: object, key: jax.Array | None = None
    ) -> Any:
        """Return `((mean loss, summaries, variables), grads)`, computed in `accumulate_steps` microbatches."""
        return value_and_grad(loss, params, variables, batch, key, self.cfg.accumulate_steps)

    def update(
        self, grads: object, state: LearnerState, params: object, loss: jax.Array
    ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
        """Update the parameters.

        If the loss or a gradient is not finite, skip the update: parameters, optimizer state, and average do not change.

        Returns:
            The new parameters, the new state, and scalar summaries: `grad_norm` before clipping, `learning_rate`,
            `skipped_steps`, `skipped`.
        """
        plan = self._plan(params)
        old, grads = plan.trained(flatten(params)), plan.trained(flatten(grads))
        norm = global_norm({p: g for p, g in grads.items() if p not in plan.labels})
        finite = jnp.isfinite(norm) & jnp.isfinite(loss) & jnp.isfinite(global_norm({p: grads[p] for p in plan.labels}))

        def step(old: Any, optimizer: Any, average: Any, grads: Any) -> tuple[Any, Any, Any]:
            if self.cfg.max_grad_norm is not None:
                grads = grads | _clip(
                    {p: g for p, g in grads.items() if p not in plan.labels}, norm, self.cfg.max_grad_norm
                )
            for paths, limit in plan.clipped_groups(self.cfg.rules):
                group = {p: grads[p] for p in paths}
                grads = grads | _clip(group, global_norm(group), limit)
            updates, optimizer = plan.optimizer.update(grads, optimizer, old, value=loss)
            new = optax.apply_updates(
                old, {p: u * plan.scales[p] if p in plan.scales else u for p, u in updates.items()}
            )
            return new, optimizer, self._update_average(average, new)

        with jax.numpy_dtype_promotion("standard"):  # optax computes integer powers of its decays
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

    def frozen_params(self, paths: Iterable[str]) -> list[str]:
        """Return the parameters that a rule freezes; see `axlearn_core.contracts.capabilities.FreezesParameters`."""
        return self._frozen(paths)

    def frozen_variables(self, paths: Iterable[str]) -> list[str]:
        """Return the variables that a rule freezes; see `axlearn_core.contracts.capabilities.FreezesVariables`."""
        return self._frozen(paths)

    def _frozen(self, paths: Iterable[str]) -> list[str]:
        paths = list(paths)
        frozen = {p for rule in self.cfg.rules if rule.freeze for p in match_paths(rule.pattern, paths)}
        return [path for path in paths if path in frozen]

    def evaluation_params(self, state: LearnerState, params: object) -> Any:
        """Return the parameters for evaluation.

        They are the moving average in the parameters' dtypes, or the optimizers' evaluation parameters, or `params`.
        """
        flat = flatten(params)
        if state.ema is not None:
            return unflatten(params, {p: a.astype(flat[p].dtype) for p, a in state.ema.items()})
        if not any(isinstance(r, EvaluatesWith) for r in (self.cfg.optimizer, *(r.optimizer for r in self.cfg.rules))):
            return params
        plan, evaluated = self._plan(params), {}
        for optimizer, label, paths in self._evaluation_optimizers(plan):
            inner = state.optimizer.inner_states[label].inner_state if plan.labels else state.optimizer
            group = {p: flat[p] if p in paths else optax.MaskedNode() for p in plan.names}
            with jax.numpy_dtype_promotion("standard"):
                averaged = optimizer.evaluation_params(inner, group)
            evaluated |= {p: averaged[p].astype(flat[p].dtype) for p in paths}
        return unflatten(params, evaluated)

    def _evaluation_optimizers(self, plan: "_UpdatePlan") -> Iterator[tuple[EvaluatesWith, str, list[str]]]:
        """Yield each optimizer that provides evaluation parameters, with its label and its parameters."""
        for label in ("", *sorted(set(plan.labels.values()))):
            optimizer = self.cfg.rules[int(label)].optimizer if label else self.cfg.optimizer
            paths = [p for p in plan.names if plan.labels.get(p, "") == label]
            if isinstance(optimizer, EvaluatesWith) and paths:
                yield optimizer, label, paths

    def _check_evaluation(self, plan: "_UpdatePlan") -> None:
        for optimizer, label, paths in self._evaluation_optimizers(plan):
            path = f"learner.rules.{label}.optimizer" if label else "learner.optimizer"
            kind = type(optimizer).__qualname__
            if self.cfg.ema_decay is not None:
                raise ConfigError(
                    Problem(
                        path="learner.ema_decay",
                        message=f"{path} ({kind}) already keeps an average, which evaluation uses",
                        got=str(self.cfg.ema_decay),
                        expected="null",
                    )
                )
            if scaled := [p for p in paths if p in plan.scales]:
                raise ConfigError(
                    Problem(
                        path="learner.rules",
                        message=f"{path} ({kind}) keeps an average that does not account for scaled updates",
                        got=f"a learning_rate_scale for {scaled[0]}",
                        fix="give those parameters a separate optimizer with a different learning rate",
                    )
                )

    def _update_average(self, average: dict[str, jax.Array] | None, new: Any) -> dict[str, jax.Array] | None:
        decay = self.cfg.ema_decay
        if average is None or decay is None:
            return average
        return {p: decay * a + (1 - decay) * new[p].astype(a.dtype) for p, a in average.items()}

    def _plan(self, params: object) -> "_UpdatePlan":
        """Apply the rules to the parameter paths. Each trace builds a new plan."""
        flat = flatten(params)
        scales: dict[str, float] = {}
        exempt: set[str] = set()
        frozen: set[str] = set()
        labels: dict[str, str] = {}
        rules = self.cfg.rules
        matched = [select(rule.pattern, flat, setting=f"learner.rules.{i}.pattern") for i, rule in enumerate(rules)]
        nodes = dict.fromkeys(flat, self.cfg.optimizer)
        for rule, paths in zip(rules, matched, strict=True):
            nodes |= {} if rule.optimizer is None else dict.fromkeys(paths, rule.optimizer)
        for i, (rule, paths) in enumerate(zip(rules, matched, strict=True)):
            factors = rule.scale_updates({p: flat[p] for p in paths}, self._axes, nodes)
            scales |= {p: scales.get(p, 1.0) * factor for p, factor in factors.items()}
            exempt |= set() if rule.weight_decay else set(paths)
            frozen |= set(paths) if rule.freeze else set()
            labels |= dict.fromkeys(paths, str(i)) if rule.optimizer is not None else {}
        names = [p for p in flat if p not in frozen]
        if not names:
            raise ConfigError(
                Problem(path="learner.rules", message="every parameter is frozen, so there is nothing to train")
            )
        plan = _UpdatePlan(names, [p for p in names if p in exempt], {p: s for p, s in scales.items() if s != 1.0})
        mask = {"mask": plan.mask, "weight_decay_mask": plan.mask} if plan.exempt else {}
        plan.labels = {p: i for p, i in labels.items() if p not in frozen}

        def built(optimizer: Node[Optimizer], label: str) -> Optimizer:
            axes = {p: self._axes.get(p) for p in names if plan.labels.get(p, "") == label}
            transformation = optimizer.build(max_steps=self.max_steps, axes=axes, **mask)
            if not isinstance(transformation, optax.GradientTransformation):
                path = f"learner.rules.{label}.optimizer" if label else "learner.optimizer"
                raise ConfigError(_no_optimizer(path, transformation))
            return optax.with_extra_args_support(transformation)

        plan.optimizer = built(self.cfg.optimizer, "")
        if plan.labels:
            optimizers = {i: built(rules[int(i)].optimizer, i) for i in sorted(set(plan.labels.values()))}  # type: ignore[arg-type]
            plan.optimizer = optax.partition(
                {"": plan.optimizer, **optimizers}, {p: plan.labels.get(p, "") for p in names}
            )
        return plan


def _no_optimizer(path: str, value: object) -> Problem:
    cls = type(value)
    return Problem(
        path=path,
        message="does not build an optimizer",
        got=f"{cls.__module__}.{cls.__qualname__}",
        expected="an optax.GradientTransformation",
    )


class _UpdatePlan:
    optimizer: Any

    def __init__(self, names: list[str], exempt: list[str], scales: dict[str, float]):
        self.names, self.exempt, self.scales = names, exempt, scales
        self.labels: dict[str, str] = {}  # path -> index of the rule whose optimizer updates it
        self.masks = False  # True if the optimizer used the mask

    def clipped_groups(self, rules: tuple[ParameterRule, ...]) -> Iterator[tuple[list[str], float]]:
        """Yield the paths and maximum gradient norm of each rule that clips the gradients of its optimizer."""
        for label in sorted(set(self.labels.values())):
            if (limit := rules[int(label)].max_grad_norm) is not None:
                yield [p for p, other in self.labels.items() if other == label], limit

    def trained(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        return {p: flat[p] for p in self.names}

    def mask(self, params: Mapping[str, Any]) -> dict[str, bool]:
        self.masks = True
        return {p: p not in self.exempt for p in params}


def _step_if(finite: jax.Array, step: Callable[..., Any], before: tuple[Any, ...], grads: object) -> Any:
    """Return `step(*before, grads)` if `finite`, else `before`.

    On CPUs a conditional updates in place, but a select keeps copies of the old state. On GPUs a conditional copies the
    entire state, but a select is fused into the update. On TPUs both cost the same.
    """
    selection = get_active_selection()
    platform = jax.default_backend() if selection is None else selection.platform
    if platform in ("gpu", "tpu"):
        return jax.tree.map(lambda new, old: jax.lax.select(finite, new, old), step(*before, grads), before)
    return jax.lax.cond(finite, step, lambda *operands: operands[:-1], *before, grads)


def global_norm(tree: object) -> jax.Array:
    """Return the L2 norm over all leaves, in float32."""
    squares = (jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _clip(grads: object, norm: jax.Array, limit: float) -> Any:
    # Like optax.clip_by_global_norm, but with a single scale that XLA fuses into the optimizer. The clipped
    # gradients are therefore never stored.
    scale = jnp.where(norm < limit, jnp.ones_like(norm), limit / norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
