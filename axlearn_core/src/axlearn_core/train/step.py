"""The pure functions of a training run, which read and update the training state."""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import Function, Functional, ModelAndObjective, ModelWeights, Part, TrainState
from axlearn_core.compose.functions import batch_inputs, model_functions
from axlearn_core.contracts.capabilities import FreezesParameters, FreezesVariables, PlacesState
from axlearn_core.contracts.parts import Learner
from axlearn_core.nn.module_checks import convert_seed_error
from axlearn_core.nn.summaries import Summary, get_scalars, is_summary
from axlearn_core.train.evaluation_loss import evaluation_loss

Scalars = dict[str, jax.Array]

OBJECTIVE_STREAM = zlib.crc32(b"objective")
"""Constant that is folded into a step's key to derive the objective's own key."""


class TrainingFunctions:
    """`init`, `begin`, `weights`, `loss`, `train` and `evaluate` of a model and a learner, and the model's own functions."""

    def __init__(self, functional: Functional, learner: Learner, trained: ModelAndObjective | None = None):
        """Create the functions. If `trained` is None, the model is trained with its own loss."""
        self.functional, self.learner = functional, learner
        self.trained = trained or ModelAndObjective(functional)

    def declare(self) -> dict[str, Function]:
        """Return the functions by name."""
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
                describe="the state of step 0 with given weights",
            ),
            "weights": Function(
                call=self.weights, inputs=lambda _: (Part.STATE,), describe="the weights for evaluation and generation"
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
                frozen=self._frozen_params(),
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
        """Return the state for step 0."""
        model_key, root = jax.random.split(key)
        weights = ModelWeights(*self.functional.init_arrays(model_key))
        return self._make_state(self.trained.init_objective(model_key, weights), root)

    def begin(self, key: jax.Array, weights: ModelWeights) -> TrainState:
        """Return the state for step 0 with these weights."""
        model_key, root = jax.random.split(key)
        return self._make_state(self.trained.init_objective(model_key, weights), root)

    def _make_state(self, weights: ModelWeights, root: jax.Array) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=weights.params,
            variables=weights.variables,
            rng=jax.random.key_data(root),
            learner=self.learner.init(weights.params),
        )

    def weights(self, state: TrainState) -> ModelWeights:
        """Return the parameters for evaluation (the moving average if the learner keeps one) and the newest variables."""
        return self.trained.select_model_weights(self._evaluation_weights(state))

    def _evaluation_weights(self, state: TrainState) -> ModelWeights:
        return ModelWeights(self.learner.evaluation_params(state.learner, state.params), state.variables)

    def loss(self, weights: ModelWeights, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """Return the training (loss, summaries). A stateful model draws from a fixed key."""
        key = jax.random.key(0) if self.trained.is_stateful else None
        value, (summaries, _) = self.training_loss(weights.params, weights.variables, batch, key)
        return value, get_scalars(summaries)

    def training_loss(
        self, params: Any, variables: Any, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, tuple[dict[str, Any], Any]]:
        """Return (loss, (summaries, variables after this microbatch)). See `axlearn_core.contracts.parts.Loss`.

        Raises:
            ConfigError: The model draws from a random stream without a seed.
        """
        model, objective = self.functional.bind(params, variables, key), None
        try:
            if self.trained.objective is None:
                value, summaries = model.loss(batch)
            else:
                objective_key = None if key is None else jax.random.fold_in(key, OBJECTIVE_STREAM)
                objective = self.trained.bind_objective(params, variables, objective_key)
                value, summaries = objective.loss(model, batch, objective_key)
        except ValueError as error:
            if problem := convert_seed_error(error, model):
                raise problem from error
            raise
        return value, (dict(summaries), self.trained.extract_variables(model, objective))

    def train(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]:
        """Return (state after one step, scalars). A step that the learner skips does not change the variables."""
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
        # Return the input arrays for frozen variables, not their copies from the loop over microbatches.
        variables = {
            **variables,
            **{path: state.variables[path] for path in (*self.trained.fixed, *self._frozen_variables())},
        }
        new = state.replace(step=state.step + 1, params=params, variables=variables, learner=learner_state)
        return new, {"loss": value, **get_scalars(summaries), **reported}

    def _frozen_params(self) -> Collection[str]:
        learner = self.learner
        return learner.frozen_params(self.trained.abstract) if isinstance(learner, FreezesParameters) else ()

    def _frozen_variables(self) -> Collection[str]:
        learned = self.trained.learned
        return self.learner.frozen_variables(learned) if learned and isinstance(self.learner, FreezesVariables) else ()

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Return `loss_sum`, `weight`, `bytes` if the batch has them, and `summaries` by name if there are any."""
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
        """Return the shardings of the state. A learner may place its part in other memory, such as host memory."""
        if not isinstance(self.learner, PlacesState):
            return shardings
        return shardings.replace(learner=self.learner.place(shardings.learner, state.learner))
