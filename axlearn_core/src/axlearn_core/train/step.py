"""The training and evaluation steps: pure functions over the training state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import Functional, Steps, TrainState
from axlearn_core.contracts.parts import Learner


def make_steps(functional: Functional, learner: Learner) -> Steps:
    """The step functions for a model and a learner."""

    def init(key: jax.Array) -> TrainState:
        model_key, step_key = jax.random.split(key)
        params = functional.init(model_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            variables={},
            rng=jax.random.key_data(step_key),
            learner=learner.init(params),
        )

    def begin(key: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        return jax.random.key_data(jax.random.split(key)[1]), learner.init(params)

    def loss(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, summaries = functional.bind(params).loss(batch)
        return value, dict(summaries)

    def train(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        (value, summaries), grads = learner.value_and_grad(loss, state.params, batch)
        params, learner_state, more = learner.update(grads, state.learner, state.params, value)
        new = state.replace(step=state.step + 1, params=params, learner=learner_state)
        return new, {"loss": value, **summaries, **more}

    def model_params(state: TrainState) -> Any:
        return learner.evaluation_params(state.learner, state.params)

    def evaluate(state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        value, summaries = loss(model_params(state), {k: v for k, v in batch.items() if k != "bytes"})
        weight = summaries.get("weight", jnp.ones((), jnp.float32))
        sums = {"loss_sum": value * weight, "weight": weight}
        if "bytes" in batch:
            sums["bytes"] = jnp.sum(batch["bytes"], dtype=jnp.float32)
        return sums

    def place(places: TrainState, state: TrainState) -> TrainState:
        own = getattr(learner, "place", None)  # a learner may keep its state elsewhere than the parameters are
        return places.replace(learner=own(places.learner, state.learner)) if own else places

    return Steps(
        init=init, train=train, evaluate=evaluate, loss=loss, model_params=model_params, begin=begin, place=place
    )
