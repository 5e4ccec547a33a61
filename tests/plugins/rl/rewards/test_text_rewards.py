"""The rewards `exact`, `format` and `math-verify`."""

import asyncio

import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError
from axlearn_plugins_rl.rewards.math_verify_reward import MathVerifyReward
from axlearn_plugins_rl.rewards.text_rewards import ExactReward, FormatReward, normalize_answer
from axlearn_plugins_rl.rollout_contracts import Example
from support.rl_rewards import rollout_of


def judge(config, answer, *texts):
    reward = config.build()
    return [reward.judge(Example(id="a", prompt="?", answer=answer), text) for text in texts]


@pytest.mark.parametrize(
    ("answer", "equal", "different"),
    [
        (
            "4",
            ["4", " 4\n", "4.0", "4.", "<answer>4</answer>", "5 <answer>5</answer> no: <answer> 4 </answer>"],
            ["5", "", "44", "4?"],
        ),
        ("1234.5", ["1,234.5", "1234.50", "+1234.5", "12345e-1"], ["1,2345", "1234,5"]),
        (7, ["7", "7.0"], ["seven"]),
        ("New York", ["new  york", "NEW\nYORK", "\uff2eew York"], ["NewYork", "York"]),
        (["yes", "y"], ["Y", "yes"], ["no", "['yes', 'y']"]),
        ("", [""], ["x"]),
        ("e", ["E"], ["e5"]),
    ],
)
def test_exact_compares_values(answer, equal, different):
    assert judge(ExactReward.Config(), answer, *equal) == [1.0] * len(equal)
    assert judge(ExactReward.Config(), answer, *different) == [0.0] * len(different)


def test_exact_extracts_the_last_match():
    config = ExactReward.Config(pattern=r"#### (.*)")
    assert judge(config, "4", "#### 5\n#### 4", "4", "#### 4\n#### 5", "####4") == [1.0, 1.0, 0.0, 0.0]
    assert judge(ExactReward.Config(pattern=r"\d+"), "4", "5 and 4", "4 and 5") == [1.0, 0.0]


def test_exact_without_normalization_compares_text():
    assert judge(ExactReward.Config(normalize=False), "4", "4", "4.0", " 4") == [1.0, 0.0, 0.0]


def test_huge_numbers_are_compared_quickly():
    assert normalize_answer("1e9999") == normalize_answer("10e9998")
    assert normalize_answer("1e99999") == "1e99999"


def test_exact_needs_a_reference():
    (score,) = asyncio.run(ExactReward.Config().build().score([rollout_of("4", Example(id="a", prompt="?"))]))
    assert (
        score.error
        == "the reward ExactReward failed for the example 'a': ValueError: the example has no reference answer"
    )


def test_format_matches_the_whole_text():
    assert judge(FormatReward.Config(), None, "so\n<answer>4</answer>\n", "<answer>4", "4", "<answer>4</answer> x") == [
        1,
        0,
        0,
        0,
    ]
    assert judge(FormatReward.Config(pattern=r"-?\d+"), None, " -12 ", "1 2", "") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("config", [ExactReward.Config(pattern="("), FormatReward.Config(pattern="*")])
def test_invalid_patterns_are_reported(config):
    with pytest.raises(ConfigError, match=r"pattern: is not a regular expression"):
        check(config)


def test_a_pattern_that_backtracks_forever_only_fails_its_rollout():
    config = ExactReward.Config(pattern=r"(a+)+b", seconds=1.0)
    scores = asyncio.run(config.build().score([rollout_of("a" * 40), rollout_of("4")]))
    assert [(s.value, s.error is not None) for s in scores] == [(0.0, True), (1.0, False)]


@pytest.mark.slow
def test_math_verify_compares_expressions():
    texts = ("0.5", "$1/2$", r"so \boxed{\frac{2}{4}}", "The answer is 0.5.", "1/3", "", "\\frac{" * 50)
    example = Example(id="a", prompt="?", answer=r"\frac{1}{2}")
    reward = MathVerifyReward.Config().build()
    scores = asyncio.run(reward.score([rollout_of(text, example) for text in texts]))
    assert [s.value for s in scores] == [1, 1, 1, 1, 0, 0, 0]
    assert not any(s.error for s in scores)
    (score,) = asyncio.run(reward.score([rollout_of("1", Example(id="a", prompt="?", answer=" "))]))
    assert score.error is not None
    assert "is not a mathematical expression" in score.error
