"""Errors of losses and gradients, and the layers that they belong to."""

import numpy as np
import pytest

from axlearn_plugins_verify.prove import training_step


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
