"""Errors of losses and gradients, and the layers that they belong to."""

from types import SimpleNamespace

import numpy as np
import pytest

from axlearn_plugins_verify.prove import training_step
from support import proof_cases


def test_errors_are_relative():
    assert training_step.loss_error(2.0, 2.0) == 0
    assert training_step.loss_error(2.0, 2.2) == pytest.approx(0.1)
    assert training_step.loss_error(2.0, float("nan")) == float("inf")
    gradients = {"a": np.ones(4), "b": np.full(4, 1e-6)}
    assert training_step.gradient_errors(gradients, gradients) == {"a": 0, "b": 0}
    errors = training_step.gradient_errors(gradients, {"a": -gradients["a"], "b": -gradients["b"]})
    assert errors["a"] == pytest.approx(2, rel=0.02)
    assert errors["b"] < 0.01, "rounding of a tiny gradient does not count"
    assert training_step.gradient_errors(gradients, {**gradients, "b": np.full(4, np.nan)})["b"] == float("inf")


def test_a_parameter_belongs_to_the_longest_path_of_a_call():
    calls = {"decoder": 0, "decoder.layer.0": 1, "decoder.layer.1": 2, "decoder.layer.1.up": 3, "norm": 4}
    assert training_step.find_module("decoder.layer.up.weight", "1", calls) == "decoder.layer.1.up"
    assert training_step.find_module("decoder.layer.up.weight", "0", calls) == "decoder.layer.0"
    assert training_step.find_module("norm.weight", "", calls) == "norm"
    assert training_step.find_module("other.part.weight", "", calls) == "other.part", "a module that is not called"


class FixedStep:
    """A step with a given gradient, whatever its parameters are."""

    select_record = staticmethod(lambda value: value)

    def __init__(self, gradient, loss=1.0):
        axes = SimpleNamespace(axes={"norm.weight": (None,)})
        self.program = SimpleNamespace(config=proof_cases.tiny("quickstart"), trained=axes)
        self.result = training_step.Gradient(loss, {"norm.weight": np.full(4, gradient)})

    def evaluate(self, perturb=0.0, seed=0):
        return self.result

    def trace(self):
        return {"weight": 1.0}, []


def test_two_steps_are_compared():
    assert training_step.compare_steps(FixedStep(1.0), FixedStep(1.0), compared="both").holds
    outcome = training_step.compare_steps(FixedStep(1.0), FixedStep(1.1), compared="both")
    assert (outcome.difference.layer, outcome.difference.tensor) == ("norm", "gradient of norm.weight")
    assert outcome.error == pytest.approx(0.1, rel=0.02)
    outcome = training_step.compare_steps(FixedStep(1.0), FixedStep(1.0, loss=1.5), compared="both")
    assert outcome.difference.tensor == "loss"
