"""An objective with arrays of its own: what trains, what is kept, what a run directory of it opens as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import FrozenModel, ModelWeights, compose
from axlearn_core.config import Configurable, Node, QualifiedNames, diff, encode, flatten, node, patch
from axlearn_core.errors import ConfigError
from axlearn_core.learn import AdamW, Learner, ParameterRule
from axlearn_core.learn import flatten as flat_state
from axlearn_core.run.record import batch_dependence, short_hash
from axlearn_core.train import Trainer
from axlearn_core.train.objective import ModelLoss
from axlearn_core.train.step import TrainingFunctions
from axlearn_testing import ObjectiveSuite
from axlearn_testing.train import Line, Noise


class Count(nnx.Variable):
    """How many batches the objective saw."""


class Projected(Configurable, nnx.Module):
    """The distance of a projection of the outputs from what a frozen copy gives, and the model's loss."""

    @node
    class Config(Configurable.Config["Projected"]):
        noise: float = 0.0

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, model: Node):
        self.noise = cfg.noise
        self.head = nnx.Param(rngs.params.normal((2, 3)), out_sharding=("mlp", "embed"), eager_sharding=False)
        self.seen = Count(jnp.zeros((), jnp.int32))
        self.start = FrozenModel(model, rngs=rngs)

    def loss(self, model, batch, key):
        base, summaries = model.loss(batch)
        if key is not None:
            self.seen[...] = self.seen[...] + 1
        x = batch["x"]
        if key is not None and self.noise:
            x = x + self.noise * jax.random.normal(key, x.shape)
        own, start = (x @ m.weight[...] @ self.head[...] for m in (model, self.start.bind()))
        return base + jnp.mean((own - start + 1.0) ** 2), {**summaries, "base": base}


def trainer(**changes):
    cfg = Trainer.Config(
        model=Line.Config(),
        learner=Learner.Config(optimizer=AdamW(learning_rate=0.1)),
        input=Noise.Config(),
        max_steps=4,
    )
    return patch(cfg, {"objective": Projected.Config(), **changes})


def program(**changes):
    return compose(trainer(**changes), jax.devices()[:1])


class TestProjected(ObjectiveSuite):
    config = Projected.Config()


class TestModelLoss(ObjectiveSuite):
    config = ModelLoss.Config()


def stepped(instance, steps=1):
    state = instance.init(0)
    for _i in range(steps):
        state, scalars = instance.train_step(state, instance.put(ObjectiveSuite().batch()))
    return state, scalars


def test_its_parameters_train_and_its_variables_are_kept():
    instance = program()
    before = jax.device_get(instance.init(0))
    state, scalars = stepped(instance, 3)
    assert set(state.params) == {"weight", "objective.head"}
    assert not np.array_equal(state.params["objective.head"], before.params["objective.head"])
    assert int(state.variables["objective.seen"]) == 3
    np.testing.assert_array_equal(state.variables["objective.start.weight"], before.params["weight"])
    assert "base" in scalars
    instance.eval_step(state, instance.put(ObjectiveSuite().batch()))
    assert int(state.variables["objective.seen"]) == 3


def test_the_learner_s_rules_are_about_its_parameters_too():
    frozen = program(**{"learner.rules": (ParameterRule(pattern="objective.head", freeze=True),)})
    before = jax.device_get(frozen.init(0).params["objective.head"])
    state, _ = stepped(frozen)
    np.testing.assert_array_equal(state.params["objective.head"], before)
    paths = list(flat_state(state.learner))
    assert any("head" in path for path in flat_state(stepped(program())[0].learner)), "without the rule it has a state"
    assert not any("head" in path for path in paths)


def test_what_it_draws_differs_by_step_and_repeats():
    instance = program(objective=Projected.Config(noise=1.0))
    (_, one), (_, two), (_, again) = stepped(instance), stepped(instance, 2), stepped(instance)
    assert one["loss"] == again["loss"]
    assert one["loss"] != two["loss"]


def test_without_one_the_config_is_what_it_was():
    with_, without = trainer(), trainer(objective=None)
    assert "objective" not in encode(without, QualifiedNames())
    assert not [path for path in flatten(without) if path.startswith("objective")]
    assert short_hash(with_) != short_hash(without)
    assert [c.path for c in diff(without, with_)] == ["objective.type", "objective.noise"]
    assert encode(with_, QualifiedNames())["objective"]["noise"] == 0.0


def test_the_model_s_loss_as_an_objective_changes_no_number():
    (one, _), (two, _) = stepped(program(objective=None), 2), stepped(program(objective=ModelLoss.Config()), 2)
    np.testing.assert_array_equal(one.params["weight"], two.params["weight"])


def test_it_says_that_it_depends_on_the_batch():
    class Contrastive(ModelLoss):
        batch_dependence = "contrasts the rows of a batch"

    assert batch_dependence(trainer(objective=None)) == ()
    assert batch_dependence(trainer(objective=Contrastive.Config())) == ("objective: contrasts the rows of a batch",)


def test_a_run_that_begins_with_other_weights_copies_those():
    instance = program()
    state = instance.init(0)
    other = state.replace(params={**state.params, "weight": state.params["weight"] + 1.0})
    head, expected = np.asarray(state.params["objective.head"]), np.asarray(other.params["weight"])
    begun = instance.begin(5, other)
    np.testing.assert_array_equal(begun.variables["objective.start.weight"], expected)
    np.testing.assert_array_equal(begun.params["objective.head"], head)


def test_gradients_stop_at_a_frozen_model():
    instance = program()
    state, batch = instance.init(0), ObjectiveSuite().batch()
    functions = TrainingFunctions(instance.functional, None, instance.trained)

    def value(variables):
        fixed = {p: x for p, x in state.variables.items() if p not in variables}
        return functions.loss(ModelWeights(state.params, {**fixed, **variables}), batch)[0]

    start = {"objective.start.weight": state.variables["objective.start.weight"]}
    np.testing.assert_array_equal(jax.grad(value)(start)["objective.start.weight"], 0.0)
    assert value(start) != value(jax.tree.map(lambda x: x + 1.0, start)), "the loss is about the frozen model"


class Plain(Configurable):
    @node
    class Config(Configurable.Config["Plain"]):
        pass

    def loss(self, model, batch, key):
        return model.loss(batch)


class Clash(Line):
    @node
    class Config(Line.Config):
        pass

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.objective = Line.Config().build(rngs=rngs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": Plain.Config()}, "objective: an objective must be an nnx.Module"),
        ({"model": Clash.Config()}, r"model \(objective.weight\): the name `objective` at the root of a model"),
    ],
)
def test_what_cannot_be_one_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        program(**changes)
