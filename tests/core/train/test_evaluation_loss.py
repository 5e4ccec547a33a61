"""Evaluation on held-out data, for models and objectives of third parties."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import Configurable, Node, node
from axlearn_core.errors import ConfigError
from axlearn_core.nn import summaries
from axlearn_core.train.evaluation_loss import evaluation_loss

BATCH = {"x": np.ones(3, np.float32)}


class Mean(nnx.Module):
    """Its score is 2, its layers add 10."""

    def loss(self, batch):
        with summaries.collect() as collector:
            summaries.add_loss("penalty", jnp.float32(10.0))
        loss = jnp.mean(batch["x"]) + 1.0
        return loss + sum(collector.losses.values()), {
            "weight": jnp.float32(3),
            **collector.summaries,
            **collector.losses,
        }


class Penalised(Mean):
    """Adds 100 by itself, and says what its score is."""

    def loss(self, batch):
        loss, report = super().loss(batch)
        return loss + 100.0, report

    def held_out_loss(self, batch):
        return super().loss(batch)


class Around(Configurable, nnx.Module):
    """Adds 1000 to what it is put around."""

    @node
    class Config(Configurable.Config["Around"]):
        base: Node | None = None

    def __init__(self, base=None):
        self.base = base

    def loss(self, model, batch, key):
        loss, report = model.loss(batch) if self.base is None else self.base.loss(model, batch, key)
        return loss + 1000.0, report


class Measured(Around):
    """Reads pairs, which no model here can, and has a measure of its own."""

    def loss(self, model, batch, key):
        summaries.add_loss("never", jnp.float32(1.0))
        return jnp.sum(batch["pairs"]), {}

    def evaluation_loss(self, model, batch):
        return jnp.float32(5.0 if summaries.is_held_out() else -1.0), {"weight": jnp.float32(1)}


@pytest.mark.parametrize("model", [Mean(), Penalised()])
@pytest.mark.parametrize("objective", [None, Around(), Around(Around())])
def test_nothing_that_regularises_is_measured(model, objective):
    loss, report = evaluation_loss(objective, model, BATCH)
    assert float(loss) == 2.0
    assert {k: float(v) for k, v in report.items()} == {"weight": 3.0, "penalty": 10.0}
    assert float(model.loss(BATCH)[0]) >= 12.0, "training has it"


@pytest.mark.parametrize("objective", [Measured(), Around(Measured()), Around(Around(Measured()))])
def test_an_objective_s_own_measure_is_found_below_what_is_put_around_it(objective):
    loss, _ = evaluation_loss(objective, Mean(), {"pairs": np.ones(2)})
    assert float(loss) == 5.0


def test_batches_that_nobody_can_measure_are_refused():
    with pytest.raises(ConfigError) as error:
        evaluation_loss(Around(), Mean(), {"pairs": np.ones(2)})
    message = str(error.value)
    assert "objective: has no `evaluation_loss`, and the model's own loss cannot read" in message
    assert "Around without `evaluation_loss`, and batches of pairs" in message
    assert "expected: 'x' in the batches" in message
    assert "fix: add `evaluation_loss(model, batch)`" in message
