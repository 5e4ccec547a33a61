"""Every shipped experiment, and every feature and every pair of features on the quickstart, computes what it says.

`feature_sets.txt` has sets of features that together contain every legal pair. To write it anew, after a feature was added, run
`python -m support.feature_sets` in the folder of the tests.
"""

import jax
import pytest

import axlearn_core as ax
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_verify.prove.proof import prove
from axlearn_plugins_verify.prove.proof_report import line
from support import feature_sets, toy_models


@pytest.fixture(autouse=True)
def _free_the_programs_of_each_proof():
    yield
    jax.clear_caches()


def check(experiment, *features):
    proof = prove(experiment, with_=features, seeds=1, minutes=10)
    assert proof.holds, "\n".join(map(line, proof.failures))
    assert any(check.status == "holds" for check in proof.checks)


def test_the_quickstart_with_a_covering_set_of_features():
    features = ["rope", "gradient-accumulation:steps=2", "ema", "remat"]
    only = ["causality", "gradients", "microbatches", "remat"]
    proof = prove("quickstart", with_=features, only=only, seeds=1)
    assert [(c.name, c.status) for c in proof.checks] == [(name, "holds") for name in only]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [entry.name for entry in registry().entries("experiments")])
def test_a_shipped_experiment(experiment):
    check(experiment)


@pytest.mark.slow
@pytest.mark.parametrize("name", toy_models.features())
def test_a_feature_on_the_quickstart(name):
    features = toy_models.use(name)
    try:
        ax.resolve("quickstart", with_=features)
    except RequestError as error:
        pytest.skip(f"needs another experiment: {error}")
    check("quickstart", *features)


@pytest.mark.slow
@pytest.mark.parametrize("features", feature_sets.read(), ids="+".join)
def test_features_together_on_the_quickstart(features):
    check("quickstart", *feature_sets.options(features))


@pytest.mark.slow
def test_the_sets_contain_every_legal_pair():
    contained = {pair for features in feature_sets.read() for pair in feature_sets.pairs(features)}
    assert feature_sets.legal_pairs() <= contained
