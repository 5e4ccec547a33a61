"""The functions of a training run: pure functions over the training state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import Function, Functional, ModelWeights, Part, TrainState
from axlearn_core.compose.functions import batch_inputs, model_functions
from axlearn_core.contracts.parts import Learner

Scalars = dict[str, jax.Array]


class TrainingFunctions:
    """`init`, `weights`, `loss`, `train` and `evaluate` of a model and a learner, and what the model itself declares."""

    def __init__(self, functional: Functional, learner: Learner):
        self.functional, self.learner = functional, learner

    def declare(self) -> dict[str, Function]:
        """The functions by name."""
        return {
            **model_functions(self.functional),
            "init": Function(
                call=self.init,
                inputs=lambda _: (Part.KEY,),
                outputs=lambda _: Part.STATE,
                runs_once=True,
                place=self.place,
                describe="the state of step 0",
            ),
            "begin": Function(
                call=self.begin,
                inputs=lambda _: (Part.KEY, Part.WEIGHTS),
                outputs=lambda _: Part.STATE,
                donate=(1,),
                runs_once=True,
                describe="the state of a run that begins with given weights",
            ),
            "weights": Function(
                call=self.weights, inputs=lambda _: (Part.STATE,), describe="what to evaluate and generate with"
            ),
            "loss": Function(
                call=self.loss,
                inputs=lambda batch: (Part.WEIGHTS, batch_inputs(batch)),
                outputs=lambda _: Part.REPLICATED,
                describe="the loss that a training step differentiates",
            ),
            "train": Function(
                call=self.train,
                inputs=lambda batch: (Part.STATE, batch_inputs(batch)),
                outputs=lambda _: (Part.STATE, Part.REPLICATED),
                donate=(0,),
                differentiates=True,
                describe="one training step",
            ),
            "evaluate": Function(
                call=self.evaluate,
                inputs=lambda batch: (Part.STATE, batch_inputs(batch)),
                outputs=lambda _: Part.REPLICATED,
                describe="the summed loss of a held-out batch",
            ),
        }

    def init(self, key: jax.Array) -> TrainState:
        """The state of step 0."""
        model_key, root = jax.random.split(key)
        return self._state_of(ModelWeights(*self.functional.init_arrays(model_key)), root)

    def begin(self, key: jax.Array, weights: ModelWeights) -> TrainState:
        """The state of step 0 with these weights."""
        return self._state_of(weights, jax.random.split(key)[1])

    def _state_of(self, weights: ModelWeights, root: jax.Array) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=weights.params,
            variables=weights.variables,
            rng=jax.random.key_data(root),
            learner=self.learner.init(weights.params),
        )

    def weights(self, state: TrainState) -> ModelWeights:
        """The parameters to evaluate with (a moving average where the learner keeps one), and the newest variables."""
        return ModelWeights(self.learner.evaluation_params(state.learner, state.params), state.variables)

    def loss(self, weights: ModelWeights, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """(loss, summaries) as in training. Where the model draws, from a fixed key."""
        key = jax.random.key(0) if self._is_stateful() else None
        value, (summaries, _) = self.training_loss(weights.params, weights.variables, batch, key)
        return value, summaries

    def training_loss(
        self, params: Any, variables: Any, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Scalars, Any]]:
        """(loss, (summaries, new variables)); see `axlearn_core.contracts.parts.Loss`."""
        model = self.functional.bind(params, variables, key)
        value, summaries = model.loss(batch)
        return value, (dict(summaries), self.functional.variables_of(model))

    def train(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]:
        """(the state after one step, scalars). A step that the learner skips leaves the variables as they were."""
        key = None
        if self._is_stateful():
            key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        (value, summaries, variables), grads = self.learner.value_and_grad(
            self.training_loss, state.params, state.variables, batch, key
        )
        params, learner_state, reported = self.learner.update(grads, state.learner, state.params, value)
        reported = dict(reported)
        skipped = reported.pop("skipped", None)
        if skipped is not None:
            variables = jax.tree.map(lambda new, old: jnp.where(skipped, old, new), variables, state.variables)
        new = state.replace(step=state.step + 1, params=params, variables=variables, learner=learner_state)
        return new, {"loss": value, **summaries, **reported}

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> Scalars:
        """`loss_sum` and `weight`, and `bytes` where the batch has them."""
        weights = self.weights(state)
        model = self.functional.bind(weights.params, weights.variables)
        value, summaries = model.loss({k: v for k, v in batch.items() if k != "bytes"})
        weight = summaries.get("weight", jnp.ones((), jnp.float32))
        sums = {"loss_sum": value * weight, "weight": weight}
        if "bytes" in batch:
            sums["bytes"] = jnp.sum(batch["bytes"], dtype=jnp.float32)
        return sums

    def place(self, shardings: TrainState, state: TrainState) -> TrainState:
        """The shardings of the state; a learner may keep its part elsewhere than the parameters are."""
        own = getattr(self.learner, "place", None)
        return shardings.replace(learner=own(shardings.learner, state.learner)) if own else shardings

    def _is_stateful(self) -> bool:
        return bool(self.functional.streams or self.functional.variables)
