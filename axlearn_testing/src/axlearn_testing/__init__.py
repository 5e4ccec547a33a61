"""Conformance suites for plugins. Each suite tests the contract of one kind of part.

    class TestMyNorm(LayerSuite):
        config = MyNorm.Config()

pytest collects the suite's test methods from your own file. Only tests should import this package.
"""

import pytest

for _module in (
    "checkpoint", "common", "data", "dropped", "feature", "kernel", "layer", "learn", "measure", "objective", "options",
    "process_group", "tokenizer", "tracker", "train", "weights",
):  # fmt: skip
    pytest.register_assert_rewrite(f"{__name__}.{_module}")  # must come before the import

from axlearn_testing.checkpoint import CheckpointerSuite, StorageSuite  # noqa: E402
from axlearn_testing.contracts import Contract, find_contract  # noqa: E402
from axlearn_testing.data import InputSuite  # noqa: E402
from axlearn_testing.dropped import Dropped, find_dropped, find_dropped_in_turn  # noqa: E402
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
    "Case", "CheckpointerSuite", "CommandOptionSuite", "CommandSuite", "Contract", "Dropped", "EvaluatorSuite", "FeatureSuite",
    "InputSuite", "KernelSuite", "LayerSuite", "LearnerSuite", "ObjectiveSuite", "ProcessGroupSuite", "ProfilerSuite",
    "StorageSuite", "TokenizerSuite", "TrackerSuite", "TrainerSuite", "WatchdogSuite", "WeightsSuite", "find_contract",
    "find_dropped", "find_dropped_in_turn",
]  # fmt: skip
