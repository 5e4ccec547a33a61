"""The sampling parameters of a policy."""

from types import SimpleNamespace

import pytest

from axlearn_plugins_rl.engine_policy import EnginePolicy, _put_copies_last


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


def test_requests_with_an_earlier_prompt_start_last():
    waiting = [
        (SimpleNamespace(prompt=prompt, id=i), (), None) for i, prompt in enumerate([(1,), (1,), (2,), (1,), (2,)])
    ]
    assert [entry[0].id for entry in _put_copies_last(waiting)] == [0, 2, 1, 4, 3]
