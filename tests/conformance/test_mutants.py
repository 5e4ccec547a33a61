"""Every suite catches wrong implementations: each mutant violates one requirement, and a test of its suite fails."""

import importlib
import re

import pytest

import axlearn_testing as testing
from support.mutants import harness
from support.paths import ROOT

PLANTED = [
    mutant
    for module in ("layers", "recurrent", "training", "storage", "running", "serving")
    for mutant in importlib.import_module(f"support.mutants.{module}").MUTANTS
]
DOCS = ROOT / "docs/testing.md"


def _marked(values, slow):
    return [pytest.param(v, id=str(i), marks=pytest.mark.slow if slow(v) else ()) for i, v in values]


@pytest.mark.slow_cases(
    "EvaluatorSuite-ignores-the-model",
    "KVCacheSuite-rounds-to-bfloat16",
    "LatentCacheSuite-rounds-to-bfloat16",
    "TrainerSuite-depends-on-the-clock",
    "TrainerSuite-skips-the-first-batch-of-a-resumed-run",
)
@pytest.mark.parametrize("mutant", _marked([(m, m) for m in PLANTED], lambda m: m.slow))
def test_the_suite_fails_for_a_wrong_one(mutant, request):
    with pytest.raises((*harness.FAILURES, *mutant.errors)):
        harness.run_test(mutant.suite, mutant.test, request)


RIGHT = {(m.right, m.test): m for m in PLANTED}


@pytest.mark.slow_cases(
    "CommandOptionSuite-is-not-listed",
    "EvaluatorSuite-changes-the-state",
    "EvaluatorSuite-ignores-the-model",
    "EvaluatorSuite-returns-a-metric-without-its-own-name",
    "EvaluatorSuite-returns-random-values",
    "KVCacheSuite-loses-written-entries",
    "KVCacheSuite-writes-all-rows-to-one-slot",
    "LatentCacheSuite-loses-written-entries",
    "LatentCacheSuite-writes-all-rows-to-one-slot",
    "LayerSuite-divides-by-zero",
    "LearnerSuite-applies-gradients-that-are-not-finite",
    "LearnerSuite-changes-nothing",
    "LearnerSuite-increases-the-loss",
    "LearnerSuite-uses-half-of-the-batch",
    "ObjectiveSuite-ignores-its-option",
    "ObjectiveSuite-ignores-the-batch",
    "ObjectiveSuite-ignores-the-model",
    "ObjectiveSuite-sums-over-the-batch-instead-of-averaging",
    "ProfilerSuite-prints-to-standard-output",
    "ProfilerSuite-writes-no-trace",
    "TrainerSuite-depends-on-the-clock",
    "TrainerSuite-evaluates-nothing",
    "TrainerSuite-skips-the-first-batch-of-a-resumed-run",
)
@pytest.mark.parametrize("mutant", _marked([(m, m) for m in RIGHT.values()], lambda m: m.slow))
def test_the_same_test_passes_for_the_right_one(mutant, request):
    """Check that the planted error is the reason for the failure."""
    harness.run_test(mutant.right, mutant.test, request)


def _suites():
    from axlearn_plugins_serving import testing as serving
    from axlearn_plugins_transformer.attention_variants.testing import LatentCacheSuite
    from axlearn_plugins_transformer.testing import KVCacheSuite, RecurrentSuite

    core = [getattr(testing, name) for name in testing.__all__ if name.endswith("Suite")]
    suites = [getattr(serving, name) for name in serving.__all__ if name.endswith("Suite")]
    return [*core, RecurrentSuite, KVCacheSuite, LatentCacheSuite, *suites]


def _mutants_of(cls):
    return [m for m in PLANTED if m.suite.__mro__[1] is cls]


@pytest.mark.parametrize("cls", _suites(), ids=lambda c: c.__name__)
def test_every_suite_has_three_mutants(cls):
    assert len(_mutants_of(cls)) >= 3


@pytest.mark.parametrize("cls", _suites(), ids=lambda c: c.__name__)
def test_the_page_lists_the_mutants(cls):
    row = re.search(rf"^\| `{cls.__name__}` \| (.*) \|$", DOCS.read_text().partition("## Mutants")[2], re.MULTILINE)
    assert row, f"docs/testing.md, Mutants, has no row for {cls.__name__}"
    assert row[1] == "; ".join(m.name for m in _mutants_of(cls))
