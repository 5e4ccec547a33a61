"""Conformance suites of the slots that this plugin defines, as those of `axlearn_testing`; they need pytest."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.scheduling")  # before it is imported

from axlearn_plugins_serving.testing.scheduling import DrafterSuite, SchedulerSuite  # noqa: E402

__all__ = ["DrafterSuite", "SchedulerSuite"]
