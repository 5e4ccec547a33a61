"""Suite for objectives."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import Functional, Program, compose
from axlearn_core.compose.objective import PREFIX
from axlearn_core.config import Node, check, get_fields, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.learn import AdamW, Learner
from axlearn_core.learn.paths import flatten
from axlearn_core.train import Trainer
from axlearn_testing.common import assert_close, assert_equal, compile_fast, is_float, need_devices, norm
from axlearn_testing.train import Line, Noise


class ObjectiveSuite:
    """Tests that every objective must pass, with a model that it supports.

    Attributes:
        config: Config of the objective.
        model: Config of the model; the default has eight parameters and accepts batches of `x` [8, 4] and `y` [8, 2].
        tolerance: Tolerance between one device and eight, and between a whole batch and microbatches.
        mesh: Shape of the eight-device mesh.
        options: Config path -> a value that changes the loss, its summaries or the gradients. The default changes every
            number and switch of the config.
    """

    config: Node[Any]
    model: Node[Any] = Line.Config()
    tolerance: float = 1e-5
    mesh: Mapping[str, int] = {"data": 4, "tensor": 2}
    options: Mapping[str, Any] | None = None

    def batch(self) -> dict[str, np.ndarray]:
        """Return a batch of eight rows, as the model's input would."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal((8, 4), np.float32)
        return {"x": x, "y": x[:, :2] - x[:, 2:]}

    def changes(self) -> dict[str, Any]:
        """Return path -> changed value, from `options`, or for each number and switch at the top level of the config."""
        if self.options is not None:
            return dict(self.options)
        fields = get_fields(self.config)
        changed_values = {
            n: (not x if isinstance(x, bool) else 0.5 * x + 0.1)
            for n, x in fields.items()
            if isinstance(x, (bool, float))
        }
        return {n: x for n, x in changed_values.items() if _valid(patch(self.config, {n: x}))}

    def program(self, devices: int = 1, objective: Node[Any] | None = None, **learner: Any) -> Program:
        """Compose a training program for the model with this objective, or with the given one."""
        cfg = Trainer.Config(
            model=self.model,
            objective=objective or self.config,
            learner=Learner.Config(optimizer=AdamW(learning_rate=0.01), **learner),
            input=Noise.Config(),
            mesh=Mesh(shape=dict(self.mesh) if devices > 1 else {}),
            max_steps=4,
        )
        return _compose(type(self), cfg, devices)

    def perturb_state(self, program: Program) -> Any:
        """Return a state with changed model parameters, so that no two models in the state are equal."""
        state = program.init(0)
        rng = np.random.default_rng(2)

        def move(path: str, x: Any) -> Any:
            if path.startswith(PREFIX) or not is_float(x):
                return x
            return jax.device_put(x + jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), x.sharding)

        return state.replace(params={p: move(p, x) for p, x in state.params.items()})

    def gradients(self, program: Program, batch: Mapping[str, np.ndarray] | None = None) -> Any:
        """Return ((loss, summaries, variables), gradients) of a batch, as in a training step."""
        placed = program.put(self.batch() if batch is None else batch)
        return jax.device_get(_compile_gradients(program)(self.perturb_state(program), placed))

    def test_the_loss_and_the_summaries_are_scalars(self) -> None:
        (loss, summaries, _), _ = self.gradients(self.program())
        assert loss.shape == (), "the loss must be a scalar"
        assert loss.dtype == np.float32, "the loss must be float32"
        assert np.isfinite(loss), "the loss must be finite"
        assert all(np.shape(x) == () for x in summaries.values()), "summaries must be scalars"

    def test_every_option_has_an_effect(self) -> None:
        before = self.gradients(self.program())
        for path, value in self.changes().items():
            after = self.gradients(self.program(objective=patch(self.config, {path: value})))
            same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=False)]
            changed = not all(same) or jax.tree.structure(after) != jax.tree.structure(before)
            assert changed, f"{path}={value} does not change the loss, a summary or a gradient"

    def test_loss_depends_on_batch(self) -> None:
        program = self.program()
        other = {
            k: np.roll(x, 1, axis=0) * 2 if is_float(x) else np.roll(x, 1, axis=-1) for k, x in self.batch().items()
        }
        (one, *_), _ = self.gradients(program)
        (two, *_), _ = self.gradients(program, other)
        assert one != two, "two different batches have the same loss"

    def test_gradients_reach_the_model(self) -> None:
        _, grads = self.gradients(self.program())
        assert all(np.isfinite(g).all() for g in grads.values()), "gradients must be finite"
        assert norm(*(g for p, g in grads.items() if not p.startswith(PREFIX))) > 0, (
            "all of the model's gradients are zero"
        )

    def test_model_paths_are_unchanged(self) -> None:
        program, model = self.program(), Functional.from_config(self.model)
        model_paths = [p for p in program.trained.abstract if not p.startswith(PREFIX)]
        assert model_paths == list(model.abstract), "the objective must not change the model's parameter paths"
        weights = program.weights(program.state)
        assert set(weights.params) == set(model.abstract), "evaluation and export must get only the model"
        assert set(weights.variables) == set(model.variables), "evaluation and export must get only the model"

    def test_frozen_arrays_are_not_trained(self) -> None:
        program = self.program()
        frozen_paths = {
            p for prefix in program.trained.frozen for p in program.trained.variables if p.startswith(f"{prefix}.")
        }
        if not frozen_paths:
            pytest.skip("needs an objective with frozen models")
        moments = [path for path in flatten(program.state.learner) if any(path.endswith(f".{p}") for p in frozen_paths)]
        assert not moments, f"the optimizer has state for frozen arrays: {moments[:3]}"
        state = program.init(0)
        before = jax.device_get({p: state.variables[p] for p in frozen_paths})
        after, _ = program.train_step(state, program.put(self.batch()))
        assert_equal(jax.device_get({p: after.variables[p] for p in frozen_paths}), before, "frozen arrays")

    def test_step_changes_model_and_is_deterministic(self) -> None:
        program = self.program()
        state = program.init(0)
        before = jax.device_get(state.params)
        once = jax.device_get(program.train_step(state, program.put(self.batch()))[0])
        again = jax.device_get(program.train_step(program.init(0), program.put(self.batch()))[0])
        assert any(not np.array_equal(before[p], once.params[p]) for p in before), "no parameter changed in a step"
        assert_equal(again, once, "the state after equal steps")

    def test_evaluation_draws_nothing(self) -> None:
        program = self.program()
        state, batch = self.perturb_state(program), program.put(self.batch())
        one, two = (jax.device_get(program.eval_step(state, batch)) for _ in range(2))
        assert_equal(one, two, "two evaluations")
        assert np.isfinite(one["loss_sum"]), "the evaluation loss must be finite"

    def test_microbatches_match_full_batch(self) -> None:
        full_batch, microbatches = self.program(), self.program(accumulate_steps=2)
        if full_batch.trained.batch_dependence:
            pytest.skip(
                "needs an objective that does not depend on the batch: "
                + ", ".join(full_batch.trained.batch_dependence)
            )
        (loss, _, _), grads = self.gradients(full_batch)
        (split_loss, _, _), split_grads = self.gradients(microbatches)
        assert_close(split_loss, loss, self.tolerance, "loss")
        assert_close(split_grads, grads, self.tolerance, "gradients")

    def test_sharded_results_match_unsharded(self) -> None:
        need_devices(8)
        (loss, _, _), grads = self.gradients(self.program())
        (sharded_loss, _, _), sharded_grads = self.gradients(self.program(8))
        assert_close(sharded_loss, loss, self.tolerance, "loss")
        assert_close(sharded_grads, grads, self.tolerance, "gradients")


# Cached for all tests of a suite. The latest programs are enough, because pytest runs the tests of a suite in a row.
@functools.lru_cache(maxsize=4)
def _compose(suite: type[ObjectiveSuite], config: Trainer.Config, devices: int) -> Program:
    return compose(config, jax.devices()[:devices])


@functools.lru_cache(maxsize=4)
def _compile_gradients(program: Program) -> Callable[[Any, Any], Any]:
    functions = program.functions["train"].call.__self__  # type: ignore[attr-defined]

    def run(state: Any, batch: Any) -> Any:
        with program.tracing("train"):
            return functions.learner.value_and_grad(
                functions.training_loss, state.params, state.variables, batch, jax.random.key(3)
            )

    return compile_fast(run)


def _valid(config: Node[Any]) -> bool:
    try:
        check(config)
    except ConfigError:
        return False
    return True
