"""Real processes under Ray on this machine: whatever is done to them, the losses are those of an undisturbed run."""

import os
import signal
import subprocess
import sys

import pytest

from support import cli_runs
from support.cli_jobs import together
from support.launched_runs import ONE_DEVICE, LaunchedRun, alive, kill, parent
from support.needs import needs
from support.paths import ROOT

pytestmark = needs("ray")
STEPS = 400


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of two processes without a supervisor."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    together(cli_runs.arguments(run, steps=STEPS))
    return cli_runs.losses(run)


@pytest.mark.slow
def test_any_process_may_die_or_freeze(tmp_path, undisturbed):
    log_cache = ("--env", "JAX_DEBUG_LOG_MODULES=jax._src.compiler")
    options = ("freeze-seconds=1.5",)
    with LaunchedRun(tmp_path / "run", hosts=2, spares=2, steps=STEPS, options=options, more=log_cache) as run:
        ranks = run.attempt(1)
        kill(ranks[1])
        ranks = run.attempt(2)
        kill(ranks[0])
        ranks = run.attempt(3)
        kill(ranks[1], signal.SIGSTOP)
        ranks = run.attempt(4)
        agent = parent(ranks[0])
        kill(agent)  # the host of rank 0, as far as Ray sees it
        ranks = run.attempt(5)
        run.finish()
    assert cli_runs.losses(run.run_dir) == undisturbed  # to the last bit
    causes = [
        (e["attempt"], e["event"], e["rank"])
        for e in run.events("exited", "frozen", "lost")
        if e["reason"] != "finished"
    ]
    assert {(1, "exited", 1), (2, "exited", 0), (3, "frozen", 1), (4, "lost", 0)} <= set(causes)
    assert {e["attempt"] for e in run.events("replaced")} == {2, 3, 4, 5}
    started = run.events("started")
    assert len({e["pid"] for e in started}) == len(started) == 10  # each attempt is of new processes
    places = {(e["attempt"], e["rank"]): e["host"] for e in started}
    assert places[1, 0] == places[2, 0]  # healthy hosts keep their rank
    assert places[2, 1] == places[3, 1] != places[1, 1]
    assert not any(alive(e["pid"]) for e in started)
    # What the first attempt compiled is not compiled again: the step is loaded, and so is all else that is needed.
    first, second = ((run.run_dir / f"launch/logs/attempt-000{n}-rank-0.txt").read_text() for n in (1, 2))
    assert "CACHE MISS for 'jit_run'" in first
    assert "cache hit for 'jit_run'" not in first
    assert "loaded the compiled step" not in first
    assert "loaded the compiled step" in second
    assert "CACHE MISS for 'jit_run'" not in second


@pytest.mark.exhaustive
def test_a_hundred_random_kills_and_freezes(tmp_path):
    """`AXLEARN_FAULTS=5` tries fewer of them."""
    file = ROOT / "benchmarks/random_faults.py"
    words = ["--count", os.environ.get("AXLEARN_FAULTS", "100"), "--folder", str(tmp_path)]
    result = subprocess.run([sys.executable, str(file), *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.slow
def test_no_host_left_trains_on_with_fewer(tmp_path, undisturbed):
    options = ("host-deaths=1", "host-seconds=5")
    with LaunchedRun(tmp_path / "run", hosts=2, steps=60, options=options) as run:
        kill(run.attempt(1)[1])
        run.attempt(2)
        run.finish()
    (host,) = [e["host"] for e in run.events("started") if (e["attempt"], e["rank"]) == (1, 1)]
    assert [e["host"] for e in run.events("set-aside")] == [host]
    assert run.events("reduced")
    assert [e["rank"] for e in run.events("started") if e["attempt"] == 2] == [0]
    for (step, loss), (_, expected) in zip(cli_runs.losses(run.run_dir), undisturbed[:60], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step


@pytest.mark.slow
def test_an_error_of_the_code_ends_the_job(tmp_path):
    settings = ("learner.optimizer={type: adamw, learning_rate: 1.0e+30}", "loop.max_nonfinite_steps=0")
    options = ("budget-user=1",)
    with LaunchedRun(tmp_path / "run", hosts=2, steps=20, settings=settings, options=options) as run:
        run.finish(1)
    text = run.errors.read_text()
    assert "an error in the training code ended the run 2 times; the budget is 1 restart" in text
    assert "non-finite" in text
    assert {e["attempt"] for e in run.events("started")} == {1, 2}


@pytest.mark.slow
def test_sigterm_saves_and_a_second_launch_goes_on(tmp_path, undisturbed):
    with LaunchedRun(tmp_path / "run", hosts=2, steps=STEPS) as run:
        run.attempt(1)
        run.process.send_signal(signal.SIGTERM)
        run.finish(128 + signal.SIGTERM)
    steps = [m["step"] for m in cli_runs.metrics(run.run_dir)]
    assert steps[-1] < STEPS
    assert (run.run_dir / "checkpoints" / str(steps[-1])).exists()
    with LaunchedRun(tmp_path / "run", hosts=2, steps=STEPS) as again:
        again.finish()
    assert cli_runs.losses(run.run_dir) == undisturbed


@pytest.mark.filterwarnings("ignore:os.fork")  # Ray's cluster for tests forks this process
@pytest.mark.slow
def test_a_node_that_is_taken_away(tmp_path, undisturbed):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        # The hosts of this cluster have the environment of the tests, in which JAX has eight devices.
        on = ("ray", "--option", f"address={cluster.address}", "--env", f"XLA_FLAGS={ONE_DEVICE}")
        with LaunchedRun(tmp_path / "run", hosts=2, spares=1, steps=STEPS, on=on) as run:
            ranks = run.attempt(1)
            agent = parent(ranks[1])
            (node,) = [n for n in nodes if parent(agent) == n.all_processes["raylet"][0].process.pid]
            cluster.remove_node(node, allow_graceful=False)
            run.attempt(2)
            run.finish()
    finally:
        cluster.shutdown()
    assert cli_runs.losses(run.run_dir) == undisturbed
    assert [e["rank"] for e in run.events("lost")] == [1]
    assert [e["rank"] for e in run.events("replaced")] == [1]
