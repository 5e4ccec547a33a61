"""The sampling parameters of a policy."""

import pytest

from axlearn_plugins_rl.engine_policy import EnginePolicy


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, ""),
        ({"temperature": 0.7, "max_tokens": 4}, ""),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5, "min_p": 0.1}, "top_k=5, min_p=0.1"),
    ],
)
def test_a_policy_names_its_limits_on_tokens(settings, limits):
    assert EnginePolicy.Config(**settings).limits == limits
