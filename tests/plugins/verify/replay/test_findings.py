"""The first tensor and the documents that are not as usual."""

import numpy as np
import pytest

from axlearn_plugins_verify.replay import findings
from axlearn_plugins_verify.replay.documents import list_documents
from axlearn_plugins_verify.replay.probes import Statistics

BATCH = {"segment_ids": np.array([[1, 1, 2, 2], [1, 1, 1, 2], [1, 2, 3, 4], [1, 1, 1, 0]], np.int32)}


def measure(layer, tensor, value, rows=(2, 4), microbatch=0):
    import attrs

    return attrs.evolve(Statistics.measure(layer, tensor, value, rows), microbatch=microbatch)


def tensor(**places):
    value = np.ones((2, 4, 3), np.float32)
    for place, number in places.items():
        value[tuple(map(int, place.removeprefix("at")))] = number
    return value


def test_first_nonfinite_tensor_and_its_documents():
    statistics = [
        measure("a", "output", tensor()),
        measure("b.c", "input", tensor(at021=np.nan, at030=np.inf)),
        measure("b.c", "output", tensor() * np.nan),
    ]
    finding = findings.first_nonfinite(statistics, list_documents(BATCH))
    assert str(finding) == "b, input of c: 2 of 24 values are not finite"
    assert [(d.row, d.number) for d in finding.documents] == [(0, 2)]


def test_input_of_a_second_call_is_named_after_the_parent():
    assert findings.name_tensor(measure("b.c", "input of call 2", tensor())) == "b, input of c of call 2"
    assert findings.name_tensor(measure("c", "input", tensor())) == "model, input of c"


def test_rows_of_a_microbatch_are_rows_of_the_batch():
    statistics = [measure("a", "output", tensor(at100=np.nan), microbatch=1)]
    finding = findings.first_nonfinite(statistics, list_documents(BATCH, 2), 2)
    assert [(d.row, d.number, d.microbatch) for d in finding.documents] == [(3, 1, 1)]


def test_padding_belongs_to_no_document():
    statistics = [measure("a", "output", tensor(at130=np.nan), microbatch=1)]
    assert findings.first_nonfinite(statistics, list_documents(BATCH, 2), 2).documents == ()


def test_growth_is_relative_to_another_batch():
    usual = findings.usual_magnitudes([measure("a", "output", tensor()), measure("b", "output", tensor() * 4)])
    statistics = [
        measure("a", "output", tensor() * 7.9),
        measure("b", "output", tensor(at102=-33.0)),
        measure("new", "output", tensor()),
    ]
    finding = findings.first_grown(statistics, usual, list_documents(BATCH))
    assert str(finding) == "b output: magnitude 33, usually 4"
    assert [(d.row, d.number) for d in finding.documents] == [(1, 1)]
    assert findings.first_grown(statistics[:1], usual, []) is None


def test_parameters_have_no_documents():
    statistics = [measure("a.weight", "gradient", np.full((2, 4), np.nan), rows=())]
    assert findings.first_nonfinite(statistics, list_documents(BATCH)).documents == ()


def test_executions_are_compared_in_order():
    real = [
        measure("a", "output", tensor()),
        measure("b", "output", tensor(at000=np.inf)),
        measure("c", "output", tensor()),
    ]
    shadow = [
        measure("a", "output", tensor() * 1.01),
        measure("b", "output", tensor()),
        measure("d", "output", tensor()),
    ]
    pairs = findings.compare_executions(real, shadow)
    assert [(d.layer, d.overflowed) for d in pairs] == [("a", False), ("b", True)]
    assert pairs[0].error == pytest.approx(0.01 / 1.01)
    assert findings.first_divergence(pairs).layer == "b"


def test_arrays_that_are_not_finite_are_named():
    import jax.numpy as jnp

    arrays = {"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf]), "c": jnp.arange(3)}
    assert findings.nonfinite_arrays(arrays) == ["b"]
