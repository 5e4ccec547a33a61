"""The launcher with simulated hosts: decisions, messages, and the same events as with real actors."""

import json
import subprocess
import sys

import pytest

from axlearn_plugins_runtime.scale.simulated_ray import LATENCY, SLOW, SimulatedRay
from axlearn_plugins_runtime.scale.supervision import supervise_simulated
from support import cli_runs, pool_answers
from support.paths import TESTS

EVENTS = ["start", "death of a process", "lost host", "64 lost hosts"]


@pytest.fixture(scope="module")
def results():
    return {hosts: supervise_simulated(hosts) for hosts in (128, 512)}


def test_each_fault_leads_to_another_attempt(results):
    for result in results.values():
        assert list(result.decisions) == EVENTS
        assert all(seconds > 0 for seconds in result.decisions.values())


def test_messages_to_a_host_do_not_grow_with_the_job(results):
    small, large = results[128], results[512]
    assert large.calls <= small.calls + 3
    assert large.job_calls <= 4.2 * small.job_calls
    assert large.job_bytes <= 4.2 * small.job_bytes


def test_small_jobs_lose_all_hosts():
    assert list(supervise_simulated(2).decisions) == [*EVENTS[:3], "2 lost hosts"]


def test_the_memory_is_measured_on_request(results):
    assert results[128].memory == 0
    assert supervise_simulated(8, memory=True).memory > 10_000


@pytest.mark.slow
def test_sixteen_real_actors_answer_like_simulated_ones():
    expected = pool_answers.simulated()
    assert expected[0] == [[host, "host"] for host in range(16)]
    assert expected[3] == [[5, "lost"]]
    command = [sys.executable, "-m", "support.pool_answers"]  # Ray forks, which the threads of JAX do not survive
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, env=cli_runs.environment(), timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == expected


def test_time_passes_only_for_the_launcher_and_in_waits():
    ray = SimulatedRay(300, slow=0.01)
    quick, slow = (ray.start_agent(host) for host in (0, 50))
    for actor, seconds in ((quick, LATENCY), (slow, SLOW)):
        begin = ray.clock.now()
        assert ray.get(actor.describe.remote())["host"].startswith("node-")
        assert seconds <= ray.clock.now() - begin < seconds + 1
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(slow.describe.remote(), timeout=0.5)
    quick.agent.lose()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(quick.describe.remote())
