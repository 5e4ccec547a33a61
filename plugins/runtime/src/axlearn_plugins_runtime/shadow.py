"""The `shadow-check` component: compare training steps with a second execution of the same steps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Function, ModelWeights, Part, Program, compose
from axlearn_core.compose.functions import batch_inputs
from axlearn_core.config import REQUIRED, Configurable, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.step import TrainingFunctions

FILE = "shadow.jsonl"
_LAYERS = "layers"


class ShadowCheck(Configurable):
    """Compares the loss and gradients of every N-th step with those of a second computation that has an additional feature.

    Both are computed before the real step from the same parameters, batch and random key, by separate programs. The run's own
    program then computes the real step as usual. The comparison needs device memory for two copies of the gradients.

    A distance is the norm of the gradient difference, relative to the norm of the real gradients. The check logs
    `shadow_loss`, `shadow_gradients` (all parameters together), `shadow_gradient/PATH` (each parameter) and `shadow_layer/N`
    (each layer of a stack). `shadow.jsonl` in the run directory lists the distance for each parameter in each layer.
    """

    @node
    class Config(Configurable.Config["ShadowCheck"]):
        """Feature and interval of the comparison.

        Attributes:
            feature: Feature of the second execution, as for `--with`. It must not change the model's parameters.
            every_steps: Steps between comparisons. The first step is always compared.
        """

        feature: str = REQUIRED
        every_steps: int = setting(default=100, ge=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._programs: tuple[Program, Program] | None = None

    def due(self, step: int) -> bool:
        """See `axlearn_core.train.loop.StepCheck`."""
        return step % self.cfg.every_steps == 0

    def take_step(self, session: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """See `axlearn_core.train.loop.StepCheck`.

        Raises:
            RequestError: The feature cannot be applied, or it changes the model's parameters.
        """
        if self._programs is None:
            config = session.program.config
            shadow = resolve(config, with_=[self.cfg.feature]).config
            self._programs = gradient_program(config), gradient_program(shadow)
            _check_parameters(*self._programs, self.cfg.feature)
        comparison = compare(*self._programs, session.state, batch)
        session.log(session.step + 1, comparison.scalars())
        if jax.process_index() == 0:
            with (session.path / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": session.step + 1, **comparison.as_json()}) + "\n")
        return session.program.train_step(session.state, batch)


class Comparison:
    """Losses and gradient distances of two executions of a step.

    Attributes:
        loss, shadow_loss: Losses of the real execution and the second execution.
        differences, norms: Norms of the gradient differences and of the real gradients, by path. Stacked parameters have one
            value per layer.
    """

    def __init__(self, loss: float, shadow_loss: float, differences: Mapping[str, Any], norms: Mapping[str, Any]):
        self.loss, self.shadow_loss = loss, shadow_loss
        self.differences = {p: np.asarray(v, np.float64) for p, v in differences.items()}
        self.norms = {p: np.asarray(v, np.float64) for p, v in norms.items()}

    def scalars(self) -> dict[str, float]:
        """Return the values to log."""
        values = {
            "shadow_loss": self.shadow_loss,
            "shadow_gradients": _ratio(self.differences.values(), self.norms.values()),
        }
        for path, differences in self.differences.items():
            values[f"shadow_gradient/{path}"] = _ratio([differences], [self.norms[path]])
        stacked = [path for path, differences in self.differences.items() if differences.ndim]
        depth = max((len(self.differences[p]) for p in stacked), default=0)
        for index in range(depth):
            paths = [p for p in stacked if index < len(self.differences[p])]
            values[f"shadow_layer/{index}"] = _ratio(
                [self.differences[p][index] for p in paths], [self.norms[p][index] for p in paths]
            )
        return values

    def as_json(self) -> dict[str, Any]:
        """Return the losses and the relative distance of each path, or of each of its layers."""
        with np.errstate(divide="ignore", invalid="ignore"):
            each = {p: np.nan_to_num(value / self.norms[p]).tolist() for p, value in self.differences.items()}
        return {"loss": self.loss, "shadow_loss": self.shadow_loss, "gradients": each}


def gradient_program(config: Any) -> Program:
    """Compose the program of a config with the functions that a comparison needs."""
    program = compose(config, jax.devices())
    learner = config.learner.build(max_steps=config.max_steps, axes=program.trained.axes)
    functions = TrainingFunctions(program.functional, learner, program.trained)
    stacked = {path: axes.index(_LAYERS) for path, axes in program.trained.axes.items() if _LAYERS in axes}

    def gradients(weights: ModelWeights, batch: Any, key: jax.Array) -> Any:
        step_key = key if program.trained.is_stateful else None
        variables = program.trained.begin_step(weights.variables)
        (loss, *_), grads = learner.value_and_grad(functions.training_loss, weights.params, variables, batch, step_key)
        return loss, ModelWeights(grads, weights.variables)

    def distances(real: ModelWeights, shadow: ModelWeights) -> Any:
        differences = {p: shadow.params[p].astype(jnp.float32) - g.astype(jnp.float32) for p, g in real.params.items()}
        return tuple({p: _norm(g, stacked.get(p)) for p, g in tree.items()} for tree in (differences, real.params))

    program.functions["gradients"] = Function(
        call=gradients,
        inputs=lambda batch: (Part.TRAINED, batch_inputs(batch), Part.KEY),
        outputs=lambda _: (Part.REPLICATED, Part.TRAINED),
        differentiates=True,
        describe="loss and gradients, without an update",
    )
    program.functions["distances"] = Function(
        call=distances,
        inputs=lambda _: (Part.TRAINED, Part.TRAINED),
        outputs=lambda _: Part.REPLICATED,
        describe="the distance between two gradients",
    )
    return program


def compare(real: Program, shadow: Program, state: Any, batch: Any) -> Comparison:
    """Compare both executions of the step that follows `state`. The state is not changed."""
    key = jax.random.fold_in(jax.random.wrap_key_data(jax.device_get(state.rng)), jax.device_get(state.step))
    weights = ModelWeights(state.params, state.variables)
    results = []
    for program in (real, shadow):
        placed = jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), weights, program.trained_spec)
        rows = {n: jax.device_put(x, s.sharding) for (n, x), s in zip(
            batch.items(), program.arguments("gradients", batch)[1].values(), strict=True
        )}  # fmt: skip
        loss, grads = program.compile("gradients", batch)(placed, rows, key)
        grads = jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), grads, real.trained_spec)
        results.append((float(loss), grads))
    (loss, grads), (shadow_loss, shadow_grads) = results
    differences, norms = jax.device_get(real.compile("distances")(grads, shadow_grads))
    return Comparison(loss, shadow_loss, differences, norms)


def _check_parameters(real: Program, shadow: Program, feature: str) -> None:
    def shapes(program: Program) -> dict[str, Any]:
        trained = program.trained
        return {p: (s.shape, s.dtype) for p, s in {**trained.abstract, **trained.variables}.items()}

    expected, actual = shapes(real), shapes(shadow)
    if expected != actual:
        path = next(p for p in {**expected, **actual} if expected.get(p) != actual.get(p))
        actual_spec, expected_spec = (f"{t[0]} {t[1]}" if (t := s.get(path)) else "absent" for s in (actual, expected))
        raise RequestError(
            f"--shadow {feature}: the feature changes the model's parameters, so both executions cannot share one state\n"
            f"    got: {path} {actual_spec}\n    expected: {expected_spec}, as in the run\n"
            "    fix: use a feature that only changes how the step is computed, such as precision:dtype=bfloat16"
        )


def _norm(gradient: jax.Array, axis: int | None) -> jax.Array:
    others = tuple(i for i in range(gradient.ndim) if i != axis)
    return jnp.sqrt(jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=others))


def _ratio(differences: Any, norms: Any) -> float:
    difference, norm = (float(np.sqrt(sum(float(np.sum(v**2)) for v in part))) for part in (differences, norms))
    return difference / norm if norm else 0.0


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `shadow.jsonl`."""
    return [json.loads(line) for line in (run_dir / FILE).read_text("utf-8").splitlines()]
