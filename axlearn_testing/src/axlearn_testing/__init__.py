"""Conformance suites: what every part of a kind has to keep, for the tests of whoever writes one.

    class TestMyNorm(LayerSuite):
        config = MyNorm.Config()

pytest collects the test methods of the suite in the author's own file. Only tests import this package.
"""

import pytest

for _module in (
    "checkpoint", "common", "data", "feature", "kernel", "layer", "learn", "measure", "objective", "options",
    "process_group", "tokenizer", "tracker", "train", "weights",
):  # fmt: skip
    pytest.register_assert_rewrite(f"{__name__}.{_module}")  # before it is imported

from axlearn_testing.checkpoint import CheckpointerSuite, StorageSuite  # noqa: E402
from axlearn_testing.contracts import Contract, contract_of  # noqa: E402
from axlearn_testing.data import InputSuite  # noqa: E402
from axlearn_testing.feature import FeatureSuite  # noqa: E402
from axlearn_testing.kernel import Case, KernelSuite  # noqa: E402
from axlearn_testing.layer import LayerSuite  # noqa: E402
from axlearn_testing.learn import LearnerSuite  # noqa: E402
from axlearn_testing.measure import EvaluatorSuite, ProfilerSuite, WatchdogSuite  # noqa: E402
from axlearn_testing.objective import ObjectiveSuite  # noqa: E402
from axlearn_testing.options import CommandOptionSuite, CommandSuite  # noqa: E402
from axlearn_testing.process_group import ProcessGroupSuite  # noqa: E402
from axlearn_testing.tokenizer import TokenizerSuite  # noqa: E402
from axlearn_testing.tracker import TrackerSuite  # noqa: E402
from axlearn_testing.train import TrainerSuite  # noqa: E402
from axlearn_testing.weights import WeightsSuite  # noqa: E402

__all__ = [
    "Case", "CheckpointerSuite", "CommandOptionSuite", "CommandSuite", "Contract", "EvaluatorSuite", "FeatureSuite", "InputSuite",
    "KernelSuite", "LayerSuite", "LearnerSuite", "ObjectiveSuite", "ProcessGroupSuite", "ProfilerSuite", "StorageSuite",
    "TokenizerSuite", "TrackerSuite", "TrainerSuite", "WatchdogSuite", "WeightsSuite", "contract_of",
]  # fmt: skip
