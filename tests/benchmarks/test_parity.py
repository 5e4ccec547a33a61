"""Log-probabilities with the kernel `invariant` do not depend on how many tokens are in a batch."""

import importlib

import jax
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.plugins.resolve import resolve
from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
ELEMENTS = 4096
"""From how many numbers on XLA for CPU computes an array by another library, if it is not told otherwise."""


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("parity")


def check(results):
    assert results
    assert [r for r in results if r.differing] == []


@pytest.mark.slow
def test_scores_of_a_large_batch_equal_those_of_small_ones(parity):
    check(parity.compare(parity.model_config(64, layers=1, vocabulary=64), ELEMENTS, 16, ["score"]))


def test_the_comparison_sees_a_difference(parity):
    """Without the kernel, XLA computes large batches by other algorithms."""
    (result,) = parity.compare(parity.model_config(64, 1, 64, invariant=False), ELEMENTS, 16, ["score"])
    assert result.compared == ELEMENTS // 16
    assert result.differing > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "tokens"), [(64, 65_536), (64, ELEMENTS + 64), (256, 65_536), (1024, ELEMENTS), (1024, 16_384)]
)
def test_training_steps_of_large_batches_have_the_scores_of_small_ones(parity, width, tokens):
    check(parity.compare(parity.model_config(width, layers=1), tokens, 64))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [ELEMENTS, 65_536])
@pytest.mark.parametrize("family", ["moe", "mla", "lora"])
def test_other_families_do_not_depend_on_the_batch(parity, family, tokens):
    check(parity.compare(parity.model_config(64, layers=1, vocabulary=256, family=family), tokens, 64))


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 256, 1024])
def test_the_largest_batches(parity, width):
    check(parity.compare(parity.model_config(width), 65_536, 64, ["score"]))


@pytest.mark.slow
@pytest.mark.parametrize("length", [32, 512])
def test_rows_of_other_lengths_and_a_vocabulary_of_its_own(parity, length):
    check(parity.compare(parity.model_config(64, vocabulary=5003), 8192, length))


@pytest.mark.fast_cases("None")
@pytest.mark.parametrize("kernel", ["invariant", None])
def test_a_training_program_is_compiled_as_the_kernel_needs(kernel):
    config = patch(resolve("quickstart", target="none").config, {"model.decoder.layer.attention.kernel": kernel})
    program = compose(config, jax.devices()[:1])
    batch = {name: jax.ShapeDtypeStruct((2, 16), "int32") for name in ("tokens", "targets")}
    program.trace("train", batch)
    products_only = program.options("train").get("xla_cpu_experimental_ynn_fusion_type")
    assert products_only == ("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT" if kernel else None)
