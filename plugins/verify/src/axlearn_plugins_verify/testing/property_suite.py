"""The conformance suite for the properties that `axlearn prove` checks."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import pytest

from axlearn_core.compose.devices import configure_devices
from axlearn_core.errors import AxlearnError
from axlearn_core.plugins.backends import prepare_backends
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_verify.prove.case import Case
from axlearn_plugins_verify.prove.contract import Outcome, Property
from axlearn_plugins_verify.prove.helper_process import DEVICES
from axlearn_plugins_verify.prove.shrink import shrink

SEEDS = (0, 1)
"""Seeds for which the property must hold."""


class PropertySuite:
    """Tests that a property must pass.

    Attributes:
        property: Class of the property.
        experiment: Experiment for which the property holds.
        features: Features of the experiment, as for `--with`.
        settings: Settings of the experiment, as for `--set`.
        faulty_features: Features that break the property, in addition to `features`.
        faulty_settings: Settings that break the property.
        fault: Function that returns a context manager, within which the property does not hold. Use it if no config breaks
            the property. None if the faulty features or settings do.
    """

    property: Callable[[], Property]
    experiment: str = "quickstart"
    features: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    faulty_features: tuple[str, ...] = ()
    faulty_settings: tuple[str, ...] = ()
    fault: Any = None  # a plain function is not called as a method

    def case(self) -> Case:
        """Return a new case of the experiment, with the first seed. Override it to use a different small config."""
        return make_case(self.experiment, self.features, self.settings)

    def faulty_case(self) -> Case:
        """Return a new case for which the property does not hold, perhaps only within `fault`."""
        features, settings = self.features + self.faulty_features, self.settings + self.faulty_settings
        if (features, settings) == (self.features, self.settings):
            return self.case()
        return make_case(self.experiment, features, settings)

    def test_summary_is_one_sentence(self) -> None:
        summary = self.property().summary
        assert isinstance(summary, str), f"`summary` must be a string, got {summary!r}"
        assert len(summary.split()) > 1, f"`summary` must say what holds, got {summary!r}"
        assert summary == " ".join(summary.split()), f"`summary` must be one line without extra spaces: {summary!r}"
        assert not any(end in summary for end in (". ", "? ", "! ")), f"`summary` must be one sentence: {summary!r}"
        assert not summary.endswith("."), f"`summary` must not end with a period: {summary!r}"

    def test_skip_reason_is_text_or_none(self) -> None:
        case = self.case()
        with _unchanged(case):
            reason = self.property().skip_reason(case)
        assert reason is None or (isinstance(reason, str) and reason.strip()), (
            f"`skip_reason` must return a reason or None, got {reason!r}"
        )
        assert reason is None, f"the property does not apply to its own experiment: {reason}"
        assert self.property().skip_reason(case) == reason, "`skip_reason` must return the same reason each time"

    def test_property_holds_and_is_deterministic(self) -> None:
        case = self.case()
        for seed in SEEDS:
            seeded = case if seed == case.seed else case.with_seed(seed)
            with _unchanged(seeded):
                outcome = self.property().check(seeded)
            check_outcome(outcome)
            assert outcome.holds, f"the property does not hold for seed {seed}: {outcome}"
            assert outcome.error <= outcome.tolerance, f"it holds, but its error exceeds its tolerance: {outcome}"
            again = self.property().check(seeded)
            assert again == outcome, f"a second check of seed {seed} differs: {outcome}, then {again}"

    def test_fault_is_found(self) -> None:
        """Introduce the fault, and expect a failure that names a place."""
        cls = type(self)
        if cls.fault is None and not self.faulty_features and not self.faulty_settings:
            pytest.fail(
                "set `fault`, `faulty_features` or `faulty_settings`: a property that cannot fail checks nothing"
            )
        planted = contextlib.nullcontext() if cls.fault is None else cls.fault()
        with planted:
            case = self.faulty_case()
            reason = self.property().skip_reason(case)
            assert reason is None, f"the property does not apply to the fault: {reason}"
            outcome = self.property().check(case)
        check_outcome(outcome, failed=True)
        assert not outcome.holds, f"the property holds even though a fault was introduced: {outcome}"
        difference = outcome.difference
        assert difference is not None
        assert difference.layer or difference.tensor, f"the failure names neither a layer nor a tensor: {outcome}"


def make_case(experiment: str, features: tuple[str, ...] = (), settings: tuple[str, ...] = ()) -> Case:
    """Shrink a config as `axlearn prove` does, and return its case with the first seed."""
    prepare_backends()
    with contextlib.suppress(AxlearnError):  # pytest may have set the devices
        configure_devices(find_machine(f"cpu-{DEVICES}"))
    original, shrunk = _shrunk(experiment, features, settings)
    return Case(shrunk.config, original=original, meshes=shrunk.meshes, seed=SEEDS[0])


@functools.lru_cache(maxsize=16)
def _shrunk(experiment: str, features: tuple[str, ...], settings: tuple[str, ...]) -> tuple[Any, Any]:
    config = resolve(experiment, with_=list(features), set=list(settings)).config
    return config, shrink(config, len(jax.devices()))


def check_outcome(outcome: Any, *, failed: bool = False) -> None:
    """Assert that an outcome is complete. The error of a failure may be infinite."""
    assert isinstance(outcome, Outcome), f"`check` must return an Outcome, got {outcome!r}"
    for name, number in (("error", outcome.error), ("tolerance", outcome.tolerance)):
        may_be_infinite = failed and name == "error"
        assert math.isfinite(number) or (may_be_infinite and number == math.inf), (
            f"`{name}` must be finite, got {number}"
        )
        assert number >= 0, f"`{name}` must not be negative, got {number}"
    assert outcome.compared.strip(), "`compared` must say what was compared"
    assert "\n" not in outcome.compared, f"`compared` must be one line, got {outcome.compared!r}"


@contextlib.contextmanager
def _unchanged(case: Case) -> Any:
    """Assert that the case is the same at the end."""
    before = _facts(case)
    yield
    for name, value in _facts(case).items():
        assert value == before[name], f"the property changed the {name} of its case"


def _facts(case: Case) -> dict[str, Any]:
    arrays = jax.device_get(case.weights())
    return {
        "config": case.config,
        "original config": case.original,
        "meshes": tuple(dict(shape) for shape in case.meshes),
        "seed": case.seed,
        "weights": [(jax.tree_util.keystr(p), x.tobytes()) for p, x in jax.tree_util.tree_leaves_with_path(arrays)],
        "batch": {name: x.tobytes() for name, x in case.batch(case.seed).items()},
    }
