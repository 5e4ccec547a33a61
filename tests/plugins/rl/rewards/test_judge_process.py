"""The worker processes that call judges."""

from axlearn_plugins_rl.rewards.judge_process import JudgePool, pack_judge
from support.rl_rewards import Unreadable, make_echo


def test_a_result_that_cannot_be_read_does_not_shift_the_others():
    pool, calls = JudgePool(1), [("1",), ("unreadable",), ("3",)]
    results = pool.submit_all(pack_judge(make_echo, Unreadable), calls, 10.0).result()
    pool.close()
    assert (results[0], results[2]) == ("1", "3")
    assert "returned a value that cannot be read" in str(results[1])
