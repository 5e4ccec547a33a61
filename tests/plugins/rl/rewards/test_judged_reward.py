"""Rewards that judge rollouts in worker processes."""

import asyncio
import subprocess
import sys
import time

import pytest

from axlearn_core.errors import ConfigError, WorkError
from axlearn_plugins_rl.rollout_contracts import Score
from support.rl_rewards import Obedient, Unreadable, rollout_of


def score(config, *texts):
    return asyncio.run(config.build().score([rollout_of(text) for text in texts]))


def test_failures_become_errors_of_their_rollouts():
    texts = ("1.5", "raise no", "exit 3", "nan", "text", "nothing", "sleep 60", "yes", "array", "-2")
    start = time.monotonic()
    scores = score(Obedient.Config(seconds=1.0), *texts)
    assert time.monotonic() - start < 30
    errors = dict(zip(texts, [s.error for s in scores], strict=True))
    assert [s.value for s in scores] == [1.5, 0, 0, 0, 0, 0, 0, 1.0, 0.5, -2.0]
    assert [s.metrics["reward_errors"] for s in scores] == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert "ZeroDivisionError: no (" in errors["raise no"]
    assert "rl_rewards.py:" in errors["raise no"]
    assert "reward Obedient failed for the example 'sum'" in errors["raise no"]
    assert errors["exit 3"].endswith("ended its process with the exit code 3")
    assert "returned nan; expected: a finite number" in errors["nan"]
    assert "returned '1'; expected: a number, or a Score" in errors["text"]
    assert "returned None" in errors["nothing"]
    assert errors["sleep 60"].endswith("took longer than 1 s")


def test_workers_judge_parts_of_a_group(tmp_path):
    log = tmp_path / "calls"
    texts = [str(n) for n in range(7)]
    assert [s.value for s in score(Obedient.Config(workers=3, log=str(log)), *texts)] == list(range(7))
    assert sorted(log.read_text().splitlines()) == texts


def test_arguments_that_a_worker_cannot_read_fail():
    good, bad = rollout_of("1"), rollout_of("2")
    object.__setattr__(bad, "example", Unreadable())
    first, second = asyncio.run(Obedient.Config().build().score([good, bad]))
    assert "this process cannot read it" in first.error  # both are in one message
    assert "this process cannot read it" in second.error
    assert asyncio.run(Obedient.Config().build().score([good]))[0].value == 1.0


def test_scores_may_have_parts_and_metrics():
    (result,) = score(Obedient.Config(), "score")
    assert result == Score(value=2.0, parts={"a": 1.0}, metrics={"words": 3.0, "reward_errors": 0.0})


@pytest.mark.parametrize(("on_error", "error"), [("drop", True), ("zero", False)])
def test_failed_rollouts_are_dropped_or_get_zero(on_error, error, capfd):
    failed, good = score(Obedient.Config(on_error=on_error), "raise no", "2")
    assert (failed.value, failed.error is not None, failed.metrics) == (0.0, error, {"reward_errors": 1.0})
    assert good.value == 2.0
    assert capfd.readouterr().err.count("warning: the reward Obedient failed") == 1


def test_a_failure_can_stop_the_training():
    with pytest.raises(WorkError, match=r"ZeroDivisionError: first[^$]*text: 'raise first'[^$]*on_error"):
        score(Obedient.Config(on_error="stop"), "1", "raise first", "raise second")


def test_failures_are_retried(tmp_path):
    log = tmp_path / "calls"
    score(Obedient.Config(retries=2, log=str(log)), "raise no", "3")
    assert sorted(log.read_text().splitlines()) == ["3", "raise no", "raise no", "raise no"]


def test_failed_rollouts_are_not_judged(tmp_path):
    log = tmp_path / "calls"
    reward = Obedient.Config(log=str(log)).build()
    (result,) = asyncio.run(reward.score([rollout_of("1", finish="error", error="no tools")]))
    assert result.error == "the rollout failed: no tools"
    assert not log.exists()


def test_prints_do_not_reach_standard_output(capfd):
    assert score(Obedient.Config(), "print results")[0].value == 0.25
    assert "results" not in capfd.readouterr().out


@pytest.mark.slow
def test_slow_rollouts_do_not_delay_other_workers():
    start = time.monotonic()
    scores = score(Obedient.Config(workers=4), *["sleep 1"] * 4)
    assert [s.value for s in scores] == [0.5] * 4
    assert time.monotonic() - start < 15


def test_settings_are_checked():
    for options in ({"seconds": 0.0}, {"retries": -1}, {"workers": 0}, {"on_error": "ignore"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Obedient.Config(**options)


SCRIPT = """
import asyncio, sys, threading, time
sys.path.insert(0, {tests!r})
from axlearn_plugins_rl.rewards import JudgedReward
from support.rl_rewards import rollout_of

class Local(JudgedReward):
    def judge(self, example, text):
        while text == "hang":
            pass
        return len(text)

print([s.value for s in asyncio.run(Local.Config().build().score([rollout_of("abc")]))], flush=True)
if sys.argv[1:] == ["hang"]:
    asyncio.run(Local.Config(seconds=600).build().score([rollout_of("hang")]))
"""


@pytest.fixture
def script(tmp_path):
    from support.paths import TESTS

    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(tests=str(TESTS)))
    return path


@pytest.mark.slow
def test_classes_of_an_unguarded_script_can_judge(script):
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[3.0]\n", result.stderr


@pytest.mark.slow
def test_a_hanging_judge_ends_with_its_trainer(script):
    process = subprocess.Popen([sys.executable, script, "hang"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "[3.0]\n"
    time.sleep(1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert children
    process.kill()
    process.wait()
    process.stdout.close()
    time.sleep(1)
    alive = subprocess.run(["ps", "-o", "pid,stat,args", "-p", ",".join(children)], capture_output=True, text=True)
    assert "judge_process" not in alive.stdout, alive.stdout
