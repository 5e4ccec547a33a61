"""Conformance suites for this plugin's slots, like those in `axlearn_testing`.

They need pytest.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.parsers", f"{__name__}.scheduling")  # before the import

from axlearn_plugins_serving.testing.parsers import Call, ReasoningFormatSuite, ToolFormatSuite  # noqa: E402
from axlearn_plugins_serving.testing.scheduling import DrafterSuite, SchedulerSuite  # noqa: E402

__all__ = ["Call", "DrafterSuite", "ReasoningFormatSuite", "SchedulerSuite", "ToolFormatSuite"]
