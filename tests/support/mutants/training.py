"""Wrong inputs, learners, objectives, loops and evaluators."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.config import Configurable, node
from axlearn_core.learn import AdamW, Learner
from axlearn_core.train.evaluators import Periodic
from axlearn_core.train.loop import TrainLoop
from axlearn_core.train.objective import ModelLoss
from axlearn_testing import EvaluatorSuite, InputSuite, LearnerSuite, ObjectiveSuite, TrainerSuite
from axlearn_testing.train import Numbers
from support.mutants.harness import mutants, suite


class Padded(Numbers):
    """Random numbers, and tokens in rows that end with padding."""

    wrong = ""

    def __next__(self):
        batch = super().__next__()
        ids = np.ones((8, 4), np.int32)
        ids[:, -1] = 0
        weights = np.ones_like(ids) if self.wrong == "weighs" else ids
        tokens = np.tile(np.arange(4, dtype=np.int32), (8, 1))
        text = {"tokens": tokens, "targets": tokens + 1, "segment_ids": ids, "weights": weights.astype(np.float32)}
        return {**batch, **text}


class Iterator(Padded):
    """An iterator with wrong ways to restore its state."""

    def __next__(self):
        if self.wrong == "repeats":
            self.position = 100
        return super().__next__()

    def set_state(self, state):
        if self.wrong != "resume":
            self.position = state + (self.wrong == "late")


class Input(Configurable):
    @node
    class Config(Configurable.Config["Input"]):
        wrong: str = ""

    def __init__(self, cfg: Config, *, seed: int):
        self.wrong, self.seed = cfg.wrong, seed

    def train(self):
        iterator = Iterator()
        iterator.wrong, iterator.position = self.wrong, 0 if self.wrong == "seed" else 100 * self.seed
        return iterator

    def evaluation(self):
        return Padded(None if self.wrong == "endless" else 2)

    def describe(self):
        return {"seed": self.seed} if self.wrong == "describes" else {}


def _input(wrong=""):
    return suite(InputSuite, Input.Config(wrong=wrong))


INPUTS = mutants(
    _input(),
    {
        "does not resume": (_input("resume"), "test_restored_state_continues_exactly"),
        "resumes one batch too late": (_input("late"), "test_restored_state_continues_exactly"),
        "ignores the seed": (_input("seed"), "test_equal_seeds_give_equal_streams"),
        "repeats one batch": (_input("repeats"), "test_batches_match_declared_arrays"),
        "gives weight to padding": (_input("weighs"), "test_batches_match_declared_arrays"),
        "never ends the evaluation": (_input("endless"), "test_evaluation_repeats"),
        "describes the seed as part of the data": (_input("describes"), "test_describe_depends_only_on_data"),
    },
)


class WrongLearner(Learner):
    @node
    class Config(Learner.Config):
        wrong: str = ""

    def init(self, params):
        state = super().init(params)
        return state._replace(ema=dict(params)) if self.cfg.wrong == "shares" else state

    def value_and_grad(self, loss, params, variables, batch, key=None):
        if self.cfg.wrong == "half":
            batch = {k: v[:4] for k, v in batch.items()}
        return super().value_and_grad(loss, params, variables, batch, key)

    def update(self, grads, state, params, loss):
        wrong = self.cfg.wrong
        if wrong == "climbs":
            grads = jax.tree.map(jnp.negative, grads)
        new, new_state, summaries = super().update(grads, state, params, loss)
        if wrong == "trusts":
            new = {p: x - 0.1 * grads[p] for p, x in params.items()}
        return params if wrong == "rests" else new, new_state, summaries


def _learner(wrong=""):
    return suite(LearnerSuite, WrongLearner.Config(wrong=wrong, optimizer=AdamW(learning_rate=0.01)))


LEARNERS = mutants(
    _learner(),
    {
        "increases the loss": (_learner("climbs"), "test_updates_lower_the_loss"),
        "changes nothing": (_learner("rests"), "test_update_is_finite_and_keeps_shapes_and_dtypes"),
        "applies gradients that are not finite": (_learner("trusts"), "test_nonfinite_gradients_skip_update"),
        "shares buffers": (_learner("shares"), "test_state_and_parameters_can_be_donated"),
        "uses half of the batch": (_learner("half"), "test_microbatches_match_full_batch"),
    },
)


class Objective(ModelLoss):
    """The model's loss, times `scale`."""

    @node
    class Config(ModelLoss.Config):
        scale: float = 2.0
        wrong: str = ""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def loss(self, model, batch, key):
        wrong = self.cfg.wrong
        if wrong == "batch":
            batch = jax.tree.map(jnp.ones_like, batch)
        loss, summaries = model.loss(batch)
        if wrong == "model":
            loss = jax.lax.stop_gradient(loss) + jnp.mean(batch["x"])
        if wrong == "sums":
            loss = loss * batch["x"].shape[0]
        if wrong == "shape":
            loss = loss[None]
        return loss * (2.0 if wrong == "option" else self.cfg.scale), summaries


def _objective(wrong=""):
    return suite(ObjectiveSuite, Objective.Config(wrong=wrong))


OBJECTIVES = mutants(
    _objective(),
    {
        "ignores its option": (_objective("option"), "test_every_option_has_an_effect"),
        "ignores the batch": (_objective("batch"), "test_loss_depends_on_batch"),
        "ignores the model": (_objective("model"), "test_gradients_reach_the_model"),
        "sums over the batch instead of averaging": (_objective("sums"), "test_microbatches_match_full_batch"),
    },
)


class Loop(TrainLoop):
    @node
    class Config(TrainLoop.Config):
        wrong: str = ""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.wrong = cfg.wrong

    def run(self, session):
        if self.wrong == "forgets":
            session.checkpointer.save = lambda *args, **kwargs: True
        super().run(session)

    def _next_batch(self, session, record):
        batch = super()._next_batch(session, record)
        if self.wrong == "skips" and session.step == session.start_step:
            batch = super()._next_batch(session, record)
        return batch

    def _step(self, session, batch):
        if self.wrong == "clock":
            batch = {**batch, "x": batch["x"] * (1 + time.perf_counter() % 1)}
        return super()._step(session, batch)

    def _evaluate_and_save(self, session, *, last):
        if self.wrong == "blind":
            session.save(force=last)
        else:
            super()._evaluate_and_save(session, last=last)


def _loop(wrong=""):
    return suite(TrainerSuite, Loop.Config(wrong=wrong))


LOOPS = mutants(
    _loop(),
    {
        "saves nothing": (_loop("forgets"), "test_run_logs_evaluates_and_saves"),
        "evaluates nothing": (_loop("blind"), "test_run_logs_evaluates_and_saves"),
        "skips the first batch of a resumed run": (_loop("skips"), "test_resumed_run_matches_uninterrupted_run"),
        "depends on the clock": (_loop("clock"), "test_runs_are_deterministic"),
    },
)


class Evaluator(Periodic):
    """The norm of the parameters."""

    @node
    class Config(Periodic.Config["Evaluator"]):
        wrong: str = ""

    def __init__(self, cfg: Config, *, name: str):
        super().__init__(cfg, name=name)
        self.clock = itertools.count()

    def due(self, step, last):
        wrong = self.cfg.wrong
        return {"never": False, "number": step}.get(wrong, super().due(step, last))

    def run(self, session):
        wrong, params = self.cfg.wrong, session.state.params
        value = float(sum(jnp.sum(x**2) for x in params.values()))
        if wrong == "changes":
            session.state = session.state.replace(params={path: x * 2 for path, x in params.items()})
        value = {"nan": float("nan"), "draws": time.perf_counter(), "constant": 1.0}.get(wrong, value)
        return {"loss" if wrong == "name" else f"{self.name}_x": value}


def _evaluator(wrong=""):
    return suite(EvaluatorSuite, Evaluator.Config(wrong=wrong, every_steps=2))


EVALUATORS = mutants(
    _evaluator(),
    {
        "never runs": (_evaluator("never"), "test_metrics_have_evaluator_name"),
        "returns NaN": (_evaluator("nan"), "test_metrics_have_evaluator_name"),
        "returns a metric without its own name": (_evaluator("name"), "test_metrics_have_evaluator_name"),
        "returns random values": (_evaluator("draws"), "test_two_evaluators_are_independent"),
        "ignores the model": (_evaluator("constant"), "test_values_depend_on_model"),
        "returns a number from `due`": (_evaluator("number"), "test_due_depends_only_on_step"),
        "changes the state": (_evaluator("changes"), "test_training_is_unchanged"),
    },
)

MUTANTS = [*INPUTS, *LEARNERS, *OBJECTIVES, *LOOPS, *EVALUATORS]
