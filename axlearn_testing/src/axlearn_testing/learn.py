"""Suite for learners."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_core.learn import without_state
from axlearn_testing.common import assert_close, assert_equal, compile_fast, leaves_by_path

AXES = {"layer.weight": ("embed", "mlp"), "layer.bias": ("mlp",), "head.weight": ("mlp", "vocab")}


class LearnerSuite:
    """Tests that every learner must pass, on a small regression problem.

    Attributes:
        config: Config of the learner.
        tolerance: Tolerance between a whole batch and microbatches, relative to the norm of each array.
        max_steps: Number of steps, which is also the horizon of schedules.
    """

    config: Node[Any]
    tolerance: float = 1e-5
    max_steps: int = 10

    def setup_method(self) -> None:
        """Skip the suite if the learner reports that these parameters cannot be trained."""
        try:
            jax.eval_shape(
                lambda p: self.learner().value_and_grad(without_state(self.loss), p, {}, self.batch(), None),
                self.params(),
            )
        except RequestError as error:
            pytest.skip(f"needs a learner for these parameters: {error}")

    def learner(self) -> Any:
        """Build the learner for `params`."""
        return self.config.build(max_steps=self.max_steps, axes=AXES)

    def params(self) -> dict[str, jax.Array]:
        """Return the parameters of two layers."""
        rng = np.random.default_rng(0)
        shapes = {"layer.weight": (4, 8), "layer.bias": (8,), "head.weight": (8, 2)}
        return {p: jnp.asarray(rng.normal(0, 0.5, s), jnp.float32) for p, s in shapes.items()}

    def batch(self, seed: int = 1) -> dict[str, Any]:
        """Return a batch of rows with unequal weights."""
        rng = np.random.default_rng(seed)
        sizes = {"x": (8, 4), "y": (8, 2)}
        weights = rng.integers(0, 4, 8).astype(np.float32)
        return {**{k: rng.standard_normal(s, np.float32) for k, s in sizes.items()}, "weights": weights}

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted mean of squared errors, and summaries."""
        hidden = jnp.tanh(batch["x"] @ params["layer.weight"] + params["layer.bias"][None])
        errors = jnp.sum((hidden @ params["head.weight"] - batch["y"]) ** 2, axis=1)
        total = jnp.sum(batch["weights"])
        return jnp.sum(errors * batch["weights"]) / total, {"weight": total, "mean_error": jnp.mean(errors)}

    @functools.cached_property
    def step(self) -> Any:
        """Return `(params, state, batch, poison) -> (params, state, summaries)`; `poison` is added to gradients and loss."""
        learner = self.learner()

        def step(params: object, state: object, batch: object, poison: tuple[Any, Any]) -> Any:
            (loss, *_), grads = learner.value_and_grad(without_state(self.loss), params, {}, batch, None)
            grads = jax.tree.map(lambda g: g + poison[0].astype(g.dtype), grads)
            return learner.update(grads, state, params, loss + poison[1])

        return compile_fast(step)

    def after(self, *poisons: tuple[float, float]) -> tuple[Any, Any]:
        """Return (params, state) after one step per poison, which is added to gradients and loss."""
        params = self.params()
        state = self.learner().init(params)
        for poison in poisons:
            params, state, summaries = self.step(params, state, self.batch(), tuple(map(jnp.float32, poison)))
            assert all(x.shape == () for x in summaries.values()), "summaries must be scalars"
        return params, state

    def test_update_is_finite_and_keeps_shapes_and_dtypes(self) -> None:
        before = self.params()
        initial = self.learner().init(before)
        params, state = self.after((0, 0), (0, 0))
        assert not _all_equal(params, before), "no parameter changed in two updates"
        for path, x in leaves_by_path((params, state)).items():
            if jnp.issubdtype(x.dtype, jnp.floating):
                assert np.isfinite(np.asarray(x, np.float32)).all(), path
        like = [jax.tree.map(lambda x: (x.shape, str(x.dtype)), t) for t in ((before, initial), (params, state))]
        assert like[0] == like[1], "an update must keep the state's structure, shapes and dtypes"
        evaluation_params = self.learner().evaluation_params(state, params)
        assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), evaluation_params) == like[0][0]

    @pytest.mark.parametrize("poison", [(np.nan, 0), (np.inf, 0), (0, np.nan)], ids=["nan", "inf", "nan-loss"])
    def test_nonfinite_gradients_skip_update(self, poison: tuple[float, float]) -> None:
        good = (0.0, 0.0)
        params, state = self.after(good, poison)
        expected, before = self.after(good)
        assert_equal(params, expected, "parameters")
        evaluation_params = self.learner().evaluation_params
        assert_equal(evaluation_params(state, params), evaluation_params(before, expected), "evaluation parameters")
        # A skipped update must not affect later steps either.
        assert_equal(self.after(good, poison, good)[0], self.after(good, good)[0], "parameters one step later")

    def test_state_and_parameters_can_be_donated(self) -> None:
        learner = self.learner()
        params = self.params()
        state = learner.init(params)
        buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
        assert len(buffers) == len(set(buffers)), (
            "two arrays in the state share a buffer, which cannot be donated twice"
        )

    def test_microbatches_match_full_batch(self) -> None:
        learner, params, batch = self.learner(), self.params(), self.batch()
        got = compile_fast(lambda p, b: learner.value_and_grad(without_state(self.loss), p, {}, b, None))(params, batch)
        full_batch = compile_fast(jax.value_and_grad(self.loss, has_aux=True))(params, batch)
        assert_close(got[1], full_batch[1], self.tolerance, "gradients")
        (loss, summaries, _), (expected, expected_summaries) = got[0], full_batch[0]
        assert_close(
            (loss, summaries["weight"]), (expected, expected_summaries["weight"]), self.tolerance, "loss and weight"
        )
        assert summaries.keys() == expected_summaries.keys(), "the summaries from the loss must be returned"

    def test_updates_lower_the_loss(self) -> None:
        good = (0.0, 0.0)
        state, params = self.learner().init(self.params()), self.params()
        before, batch = float(self.loss(params, self.batch())[0]), self.batch()
        for _ in range(self.max_steps):
            params, state, _ = self.step(params, state, batch, tuple(map(jnp.float32, good)))
        after = float(self.loss(self.learner().evaluation_params(state, params), batch)[0])
        assert after < before, (
            f"{self.max_steps} updates on one batch changed its loss from {before:.6g} to {after:.6g}"
        )

    def test_update_is_pure(self) -> None:
        assert_equal(self.after((0, 0), (0, 0)), self.after((0, 0), (0, 0)), "parameters and state of the same steps")


def _all_equal(one: object, two: object) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))
