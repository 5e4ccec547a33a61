"""Every shipped property passes the suite for properties, and the suite finds properties that are wrong."""

import contextlib
import functools

import attrs
import numpy as np
import pytest

from axlearn_plugins_verify.prove import proof
from axlearn_plugins_verify.prove.case import Case
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.testing import PropertySuite
from support import proof_cases, property_faults

# Property -> (fault, features, settings of both configs).
SHIPPED = {
    "causality": (property_faults.show_next_token, (), ()),
    "decode": (property_faults.overwrite_cache, (), ()),
    "derivatives": (property_faults.stop_gradients_of_layer, (), ()),
    "export": (property_faults.round_export, (), ()),
    "gradients": (property_faults.stop_gradients_of_layer, (), ()),
    "kernels": (property_faults.drop_soft_cap, (), ("model.decoder.layer.attention.softcap=1.0",)),
    "merged-adapters": (property_faults.merge_without_scale, ("lora:rank=2,alpha=8",), ()),
    "mesh": (property_faults.scale_sharded_layers, (), ()),
    "microbatches": (property_faults.scale_microbatches, (), ()),
    "moving-average": (property_faults.average_slowly, ("ema",), ()),
    "packed-documents": (property_faults.show_all_documents, (), ()),
    "padding": (property_faults.count_padding, (), ()),
    "remat": (property_faults.stop_gradients_of_remat, (), ()),
    "resume": (property_faults.repeat_step, (), ()),
    "scan": (property_faults.scale_scanned_layers, (), ()),
    "settings": (property_faults.drop_z_loss, (), ("model.z_loss=0.01",)),
    "updates": (property_faults.keep_final_norm, (), ()),
}
TESTS = [name for name in vars(PropertySuite) if name.startswith("test_")]


def plant(function):
    """Return a context manager from a function that takes `monkeypatch`."""

    @contextlib.contextmanager
    def planted():
        with pytest.MonkeyPatch.context() as monkeypatch:
            function(monkeypatch)
            yield

    return staticmethod(planted)


def test_every_shipped_property_is_tested():
    others = {"paged-decode"}  # of the serving engine, tested with it
    assert SHIPPED.keys() == proof.properties().keys() - others


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_property_passes_the_suite(name, test):
    fault, features, settings = SHIPPED[name]
    values = {"fault": plant(fault), "features": features, "settings": settings}
    suite = type(
        "Suite", (PropertySuite,), {"property": staticmethod(lambda: proof_cases.load_property(name)), **values}
    )
    getattr(suite(), test)()


PASSED = Outcome(error=1e-7, tolerance=1e-5, compared="two numbers")
FAILED = attrs.evolve(PASSED, error=1.0, difference=Difference(layer="decoder", tensor="", error=1.0))


class Right:
    """A property that fails for models with z-loss."""

    summary = "one number equals another"

    def skip_reason(self, case):
        return None

    def check(self, case):
        return FAILED if case.config.model.z_loss else PASSED


@functools.cache
def small(z_loss):
    return proof_cases.tiny("quickstart", (), ("model.decoder.hidden_dim=16", f"model.z_loss={z_loss}"))


class RightSuite(PropertySuite):
    property = Right
    faulty_settings = ("model.z_loss=0.01",)

    def case(self):
        return Case(small(0.0))

    def faulty_case(self):
        return Case(small(0.01))


@pytest.mark.parametrize("test", TESTS)
def test_a_right_property_passes(test):
    getattr(RightSuite(), test)()


def random_outcome(self, case):
    return attrs.evolve(PASSED, error=float(np.random.default_rng().random()) * 1e-6)


def change_meshes(self, case):
    case.meshes = ({"fsdp": 2},)


def change_seed(self, case):
    case.seed += 1
    return PASSED


HOLDS, FAULT = "test_property_holds_and_is_deterministic", "test_fault_is_found"
WRONG = {
    "has two sentences": ({"summary": "One holds. Two holds"}, "test_summary_is_one_sentence", "one sentence"),
    "ends with a period": ({"summary": "one number equals another."}, "test_summary_is_one_sentence", "period"),
    "says nothing": ({"summary": ""}, "test_summary_is_one_sentence", "say what holds"),
    "returns a flag": ({"skip_reason": lambda *_: False}, "test_skip_reason_is_text_or_none", "a reason or None"),
    "always skips": ({"skip_reason": lambda *_: "why not"}, "test_skip_reason_is_text_or_none", "does not apply"),
    "changes meshes": ({"skip_reason": change_meshes}, "test_skip_reason_is_text_or_none", "changed the meshes"),
    "returns nothing": ({"check": lambda *_: None}, HOLDS, "must return an Outcome"),
    "is infinite": ({"check": lambda *_: attrs.evolve(PASSED, error=float("inf"))}, HOLDS, "must be finite"),
    "is not a number": ({"check": lambda *_: attrs.evolve(PASSED, tolerance=float("nan"))}, HOLDS, "must be finite"),
    "exceeds its tolerance": ({"check": lambda *_: attrs.evolve(PASSED, error=1.0)}, HOLDS, "exceeds its tolerance"),
    "fails": ({"check": lambda *_: FAILED}, HOLDS, "does not hold for seed 0"),
    "is random": ({"check": random_outcome}, HOLDS, "a second check of seed 0 differs"),
    "changes the seed": ({"check": change_seed}, HOLDS, "changed the seed"),
    "compares nothing": ({"check": lambda *_: attrs.evolve(PASSED, compared=" ")}, HOLDS, "say what was compared"),
    "always holds": ({"check": lambda *_: PASSED}, FAULT, "holds even though a fault was introduced"),
    "names nothing": (
        {"check": lambda *_: attrs.evolve(FAILED, difference=Difference(layer="", tensor="", error=1.0))},
        FAULT,
        "neither a layer nor a tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_property_fails(name):
    values, test, message = WRONG[name]
    suite = type("Suite", (RightSuite,), {"property": type("Wrong", (Right,), values)})
    with pytest.raises(AssertionError, match=message):
        getattr(suite(), test)()


def test_a_suite_without_a_fault_fails():
    suite = type("Suite", (RightSuite,), {"faulty_settings": ()})
    with pytest.raises(pytest.fail.Exception, match="a property that cannot fail checks nothing"):
        suite().test_fault_is_found()
