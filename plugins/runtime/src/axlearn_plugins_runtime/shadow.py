"""The component `shadow-check`: the same step in another execution beside the real one, and how far the two part."""

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
    """Every so many steps: loss and gradients of the step, also as another feature would have them computed.

    Both are computed from the same parameters, batch and random key, by programs of their own, before the real step, which is
    computed by the run's program as always. While they are, two copies of the gradients lie on the devices.

    A distance is that of the gradients relative to the norm of the real ones. Logged are `shadow_loss`, `shadow_gradients` (of all
    together), `shadow_gradient/PATH` of each parameter and `shadow_layer/N` of each layer of a stack; `shadow.jsonl` in the run
    directory has each parameter in each layer.
    """

    @node
    class Config(Configurable.Config["ShadowCheck"]):
        """What is compared, and when.

        Attributes:
            feature: as `--with` takes it; the model has to have the same parameters with it.
            every_steps: a step is compared after each such number, and the first one.
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
            RequestError: the feature cannot be had, or the model has other parameters with it.
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
    """Loss and gradients of two executions of a step.

    Attributes:
        loss, shadow_loss: of either.
        parted, norms: path -> norm of the difference, and of the real gradient: of each layer where parameters are stacked.
    """

    def __init__(self, loss: float, shadow_loss: float, parted: Mapping[str, Any], norms: Mapping[str, Any]):
        self.loss, self.shadow_loss = loss, shadow_loss
        self.parted = {p: np.asarray(v, np.float64) for p, v in parted.items()}
        self.norms = {p: np.asarray(v, np.float64) for p, v in norms.items()}

    def scalars(self) -> dict[str, float]:
        """For trackers."""
        values = {
            "shadow_loss": self.shadow_loss,
            "shadow_gradients": _ratio(self.parted.values(), self.norms.values()),
        }
        for path, parted in self.parted.items():
            values[f"shadow_gradient/{path}"] = _ratio([parted], [self.norms[path]])
        stacked = [path for path, parted in self.parted.items() if parted.ndim]
        depth = max((len(self.parted[p]) for p in stacked), default=0)
        for index in range(depth):
            own = [p for p in stacked if index < len(self.parted[p])]
            values[f"shadow_layer/{index}"] = _ratio(
                [self.parted[p][index] for p in own], [self.norms[p][index] for p in own]
            )
        return values

    def as_json(self) -> dict[str, Any]:
        """The losses, and path -> the relative distance, or one of each layer."""
        with np.errstate(divide="ignore", invalid="ignore"):
            each = {p: np.nan_to_num(parted / self.norms[p]).tolist() for p, parted in self.parted.items()}
        return {"loss": self.loss, "shadow_loss": self.shadow_loss, "gradients": each}


def gradient_program(config: Any) -> Program:
    """A program of the config with the functions that a comparison needs."""
    program = compose(config, jax.devices())
    learner = config.learner.build(max_steps=config.max_steps, axes=program.trained.axes)
    functions = TrainingFunctions(program.functional, learner, program.trained)
    stacked = {path: axes.index(_LAYERS) for path, axes in program.trained.axes.items() if _LAYERS in axes}

    def gradients(weights: ModelWeights, batch: Any, key: jax.Array) -> Any:
        own = key if program.trained.is_stateful else None
        variables = program.trained.begin_step(weights.variables)
        (loss, *_), grads = learner.value_and_grad(functions.training_loss, weights.params, variables, batch, own)
        return loss, ModelWeights(grads, weights.variables)

    def distances(real: ModelWeights, shadow: ModelWeights) -> Any:
        parted = {p: shadow.params[p].astype(jnp.float32) - g.astype(jnp.float32) for p, g in real.params.items()}
        return tuple({p: _norm(g, stacked.get(p)) for p, g in one.items()} for one in (parted, real.params))

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
        describe="how far two gradients are apart",
    )
    return program


def compare(real: Program, shadow: Program, state: Any, batch: Any) -> Comparison:
    """Both executions of the step that comes after `state`, which stays as it is."""
    key = jax.random.fold_in(jax.random.wrap_key_data(jax.device_get(state.rng)), jax.device_get(state.step))
    weights = ModelWeights(state.params, state.variables)
    results = []
    for program in (real, shadow):
        own = jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), weights, program.trained_spec)
        rows = {n: jax.device_put(x, s.sharding) for (n, x), s in zip(
            batch.items(), program.arguments("gradients", batch)[1].values(), strict=True
        )}  # fmt: skip
        loss, grads = program.compile("gradients", batch)(own, rows, key)
        grads = jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), grads, real.trained_spec)
        results.append((float(loss), grads))
    (loss, grads), (shadow_loss, shadow_grads) = results
    parted, norms = jax.device_get(real.compile("distances")(grads, shadow_grads))
    return Comparison(loss, shadow_loss, parted, norms)


def _check_parameters(real: Program, shadow: Program, feature: str) -> None:
    def shapes(program: Program) -> dict[str, Any]:
        trained = program.trained
        return {p: (s.shape, s.dtype) for p, s in {**trained.abstract, **trained.variables}.items()}

    own, other = shapes(real), shapes(shadow)
    if own != other:
        path = next(p for p in {**own, **other} if own.get(p) != other.get(p))
        other_spec, own_spec = (f"{t[0]} {t[1]}" if (t := s.get(path)) else "absent" for s in (other, own))
        raise RequestError(
            f"--shadow {feature}: the model has other parameters with it, so that one state cannot serve both\n"
            f"    got: {path} {other_spec}\n    expected: {own_spec}, as in the run\n"
            "    fix: name a feature that changes how the step is computed, such as precision:dtype=bfloat16"
        )


def _norm(gradient: jax.Array, axis: int | None) -> jax.Array:
    others = tuple(i for i in range(gradient.ndim) if i != axis)
    return jnp.sqrt(jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=others))


def _ratio(parted: Any, norms: Any) -> float:
    difference, norm = (float(np.sqrt(sum(float(np.sum(v**2)) for v in part))) for part in (parted, norms))
    return difference / norm if norm else 0.0


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `shadow.jsonl`."""
    return [json.loads(line) for line in (run_dir / FILE).read_text("utf-8").splitlines()]
