"""The functions of a training run: pure functions over the training state."""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import Function, Functional, ModelAndObjective, ModelWeights, Part, TrainState
from axlearn_core.compose.functions import batch_inputs, model_functions
from axlearn_core.contracts.capabilities import FreezesVariables, PlacesState
from axlearn_core.contracts.parts import Learner
from axlearn_core.nn.module_checks import unseeded
from axlearn_core.nn.summaries import Summary, is_summary, values_of
from axlearn_core.train.held_out import evaluation_loss

Scalars = dict[str, jax.Array]

OBJECTIVE_STREAM = zlib.crc32(b"objective")
"""Folded into the key of a step for what an objective draws by itself."""


class TrainingFunctions:
    """`init`, `weights`, `loss`, `train` and `evaluate` of a model and a learner, and what the model itself declares."""

    def __init__(self, functional: Functional, learner: Learner, trained: ModelAndObjective | None = None):
        """`trained`: the model and its objective; None trains the model by its own loss."""
        self.functional, self.learner = functional, learner
        self.trained = trained or ModelAndObjective(functional)

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
                inputs=lambda batch: (Part.TRAINED, batch_inputs(batch)),
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
                describe="the summed loss of a held-out batch, without auxiliary terms",
            ),
        }

    def init(self, key: jax.Array) -> TrainState:
        """The state of step 0."""
        model_key, root = jax.random.split(key)
        weights = ModelWeights(*self.functional.init_arrays(model_key))
        return self._state_of(self.trained.init_objective(model_key, weights), root)

    def begin(self, key: jax.Array, weights: ModelWeights) -> TrainState:
        """The state of step 0 with these weights."""
        model_key, root = jax.random.split(key)
        return self._state_of(self.trained.init_objective(model_key, weights), root)

    def _state_of(self, weights: ModelWeights, root: jax.Array) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=weights.params,
            variables=weights.variables,
            rng=jax.random.key_data(root),
            learner=self.learner.init(weights.params),
        )

    def weights(self, state: TrainState) -> ModelWeights:
        """The model's parameters to evaluate with (an average where the learner keeps one), and its newest variables."""
        return self.trained.of_model(self._evaluation_weights(state))

    def _evaluation_weights(self, state: TrainState) -> ModelWeights:
        return ModelWeights(self.learner.evaluation_params(state.learner, state.params), state.variables)

    def loss(self, weights: ModelWeights, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """(loss, summaries) as in training. Where the model draws, from a fixed key."""
        key = jax.random.key(0) if self.trained.is_stateful else None
        value, (summaries, _) = self.training_loss(weights.params, weights.variables, batch, key)
        return value, values_of(summaries)

    def training_loss(
        self, params: Any, variables: Any, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, tuple[dict[str, Any], Any]]:
        """(loss, (summaries, variables after this microbatch)); see `axlearn_core.contracts.parts.Loss`.

        Raises:
            ConfigError: the model draws from a random stream without a seed.
        """
        model, objective = self.functional.bind(params, variables, key), None
        try:
            if self.trained.objective is None:
                value, summaries = model.loss(batch)
            else:
                own_key = None if key is None else jax.random.fold_in(key, OBJECTIVE_STREAM)
                objective = self.trained.bind_objective(params, variables, own_key)
                value, summaries = objective.loss(model, batch, own_key)
        except ValueError as error:
            if problem := unseeded(error, model):
                raise problem from error
            raise
        return value, (dict(summaries), self.trained.variables_of(model, objective))

    def train(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]:
        """(the state after one step, scalars). A step that the learner skips leaves the variables as they were."""
        key = None
        if self.trained.is_stateful:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        (value, summaries, variables), grads = self.learner.value_and_grad(
            self.training_loss, state.params, self.trained.begin_step(state.variables), batch, key
        )
        variables = self.trained.end_step(state.params, variables)
        params, learner_state, reported = self.learner.update(grads, state.learner, state.params, value)
        reported = dict(reported)
        skipped = reported.pop("skipped", None)
        if skipped is not None:
            variables = jax.tree.map(lambda new, old: jnp.where(skipped, old, new), variables, state.variables)
        # Frozen arrays stay in place, whatever loops over microbatches they were read in.
        variables = {**variables, **{path: state.variables[path] for path in (*self.trained.fixed, *self._frozen())}}
        new = state.replace(step=state.step + 1, params=params, variables=variables, learner=learner_state)
        return new, {"loss": value, **values_of(summaries), **reported}

    def _frozen(self) -> Collection[str]:
        learned = self.trained.learned
        return self.learner.frozen_variables(learned) if learned and isinstance(self.learner, FreezesVariables) else ()

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        """`loss_sum` and `weight`, `bytes` if the batch has them, and what is reported: `summaries`, name -> `Summary`."""
        weights, objective = self._evaluation_weights(state), None
        model = self.functional.bind(weights.params, weights.variables)
        if self.trained.objective is not None:
            objective = self.trained.bind_objective(weights.params, weights.variables)
        rows = {k: v for k, v in batch.items() if k != "bytes"}
        value, summaries = evaluation_loss(objective, model, rows)
        weight = summaries.get("weight", jnp.ones((), jnp.float32))
        sums: dict[str, Any] = {"loss_sum": value * weight, "weight": weight}
        if "bytes" in batch:
            sums["bytes"] = jnp.sum(batch["bytes"], dtype=jnp.float32)
        reported = {k: v if is_summary(v) else Summary(v, weight) for k, v in summaries.items() if k != "weight"}
        return {**sums, "summaries": reported} if reported else sums

    def place(self, shardings: TrainState, state: TrainState) -> TrainState:
        """The shardings of the state; a learner may keep its part elsewhere than the parameters are."""
        if not isinstance(self.learner, PlacesState):
            return shardings
        return shardings.replace(learner=self.learner.place(shardings.learner, state.learner))
