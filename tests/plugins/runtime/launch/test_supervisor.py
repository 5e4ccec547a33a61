"""The supervisor's decisions, with hosts that follow a script: no process is started."""

import json
import signal

import pytest

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_runtime.launch.journal import EVENTS, PROCESSES
from support.fake_pool import FakePool, killed, lost, supervisor


def journal(tmp_path):
    records = [json.loads(line) for line in (tmp_path / PROCESSES).read_text().splitlines()]
    assert all(record["event"] in EVENTS for record in records)
    assert all(set(record) == {"time", "attempt", "rank", "host", "pid", "event", "reason"} for record in records)
    return records


def events(tmp_path, *names):
    return [(r["attempt"], r["event"], r["rank"], r["host"]) for r in journal(tmp_path) if r["event"] in names]


def test_a_run_that_nothing_happens_to(tmp_path):
    pool = FakePool(3)
    assert supervisor(tmp_path, pool, 2).run() == 0
    assert [start[1] for start in pool.starts] == [{0: 0, 1: 1}]
    assert events(tmp_path, "started", "finished") == [
        (1, "started", 0, "node-0"),
        (1, "started", 1, "node-1"),
        (1, "finished", None, ""),
    ]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_spare_takes_the_place_and_the_others_keep_theirs(tmp_path, rank):
    pool = FakePool(4, {1: [killed(rank)]})
    assert supervisor(tmp_path, pool, 3).run() == 0
    expected = {0: 0, 1: 1, 2: 2, rank: 3}
    assert [start[1] for start in pool.starts] == [{0: 0, 1: 1, 2: 2}, expected]
    assert (2, "replaced", rank, "node-3") in events(tmp_path, "replaced")
    # All processes of the attempt are ended: they cannot go on without the one.
    alive = {r["rank"] for r in journal(tmp_path) if r["event"] == "killed"}
    assert alive >= {0, 1, 2} - {rank}


def test_each_attempt_has_a_coordinator_of_its_own_on_the_host_of_rank_0(tmp_path):
    pool = FakePool(3, {1: [killed(0)]})
    supervisor(tmp_path, pool, 2).run()
    addresses = [e["JAX_COORDINATOR_ADDRESS"] for e in pool.environments]
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
    assert addresses[0].startswith("10.0.0.0:")
    assert addresses[2].startswith("10.0.0.2:")
    assert {e["AXLEARN_JOB"] for e in pool.environments} == {pool.environments[0]["AXLEARN_JOB"]}


def test_a_dead_process_gives_its_host_back_to_the_pool(tmp_path):
    pool = FakePool(3, {1: [killed(1)], 2: [killed(0)]})
    assert supervisor(tmp_path, pool, 2).run() == 0
    assert [start[1] for start in pool.starts] == [{0: 0, 1: 1}, {0: 0, 1: 2}, {0: 1, 1: 2}]


def test_without_a_spare_the_host_itself_starts_again(tmp_path):
    pool = FakePool(2, {1: [killed(1)]})
    assert supervisor(tmp_path, pool, 2).run() == 0
    assert [start[1] for start in pool.starts] == [{0: 0, 1: 1}] * 2


def test_a_host_is_set_aside_after_so_many_deaths(tmp_path):
    pool = FakePool(3, {n: [killed(1)] for n in (1, 2, 3, 4)})
    assert supervisor(tmp_path, pool, 2, host_deaths=2, reduce=lambda n: ()).run() == 0
    assert [host for _, _, _, host in events(tmp_path, "set-aside")] == ["node-1", "node-2"]
    assert [start[1] for start in pool.starts][-1] == {0: 0}


def test_a_lost_host_is_asked_back_and_a_spare_takes_its_place(tmp_path):
    pool = FakePool(3, {1: [lost(0, for_good=True)]})
    assert supervisor(tmp_path, pool, 2).run() == 0
    assert pool.revived == [0]
    assert pool.starts[-1][1] == {0: 2, 1: 1}
    assert events(tmp_path, "lost") == [(1, "lost", 0, "node-0")]


def test_a_new_agent_lost_before_it_joins_is_requested_again(tmp_path):
    pool = FakePool(3, {1: [lost(0, for_good=True)]})
    revive = pool.revive

    def unlucky(host):  # the engine does not know yet that the node is gone
        revive(host)
        if len(pool.revived) == 1:
            pool.queue.append((host, {"event": "lost", "reason": "the actor died"}))

    pool.revive = unlucky
    assert supervisor(tmp_path, pool, 2).run() == 0
    assert pool.revived == [0, 0]
    assert events(tmp_path, "lost") == [(1, "lost", 0, "node-0")]


def test_the_cause_is_not_the_process_that_only_lost_another_one(tmp_path):
    pool = FakePool(3, {1: [killed(1, "peer", "gloo: connection closed"), killed(0, "peer", "SIGABRT"), killed(2)]})
    instance = supervisor(tmp_path, pool, 3)
    instance.run()
    assert instance.tally.counts == {"infrastructure": 1}
    assert [h.deaths for h in instance.hosts.all] == [0, 0, 1]


def test_a_connection_that_broke_by_itself_blames_no_host(tmp_path):
    pool = FakePool(2, {1: [killed(1, "peer", "connection reset")]})
    instance = supervisor(tmp_path, pool, 2)
    assert instance.run() == 0
    assert [h.deaths for h in instance.hosts.all] == [0, 0]


def test_a_stopped_process_is_frozen_once_the_limit_is_over(tmp_path):
    stopped = [(1, {"event": "progress", "stopped": seconds}) for seconds in (0.5, 2.9, 3.1)]
    pool = FakePool(3, {1: stopped})
    assert supervisor(tmp_path, pool, 2, freeze_seconds=3.0).run() == 0
    assert events(tmp_path, "frozen") == [(1, "frozen", 1, "node-1")]
    assert pool.starts[-1][1] == {0: 0, 1: 2}


def test_a_run_in_which_nothing_moves_is_started_again(tmp_path):
    pool = FakePool(2, {1: []})  # the ranks step once, and say nothing more
    instance = supervisor(tmp_path, pool, 2, hang_seconds=30)
    assert instance.run() == 0
    assert instance.tally.counts == {"stalled": 1}
    assert 30 <= pool.clock < 60  # found within twice the limit
    assert [h.deaths for h in instance.hosts.all] == [0, 0]  # nobody is alone in where it hangs


def test_a_rank_that_saves_is_waited_for_as_long_as_a_save_may_take(tmp_path):
    saving = [(0, {"event": "progress", "phase": "save"})]  # rank 1 has saved, and waits in the next step
    pool = FakePool(2, {1: saving})
    instance = supervisor(tmp_path, pool, 2, hang_seconds=30, save_seconds=200)
    assert instance.run() == 0
    assert instance.tally.counts == {"stalled": 1}
    assert 200 <= pool.clock < 230
    assert [h.deaths for h in instance.hosts.all] == [1, 0]  # it alone is in that phase


def test_a_rank_that_never_gets_to_its_save_hangs(tmp_path):
    saving = [(0, {"event": "progress", "phase": "save", "steps": 2})]  # rank 1 is a step behind
    pool = FakePool(2, {1: saving})
    instance = supervisor(tmp_path, pool, 2, hang_seconds=30, save_seconds=200)
    assert instance.run() == 0
    assert 30 <= pool.clock < 60
    assert [h.deaths for h in instance.hosts.all] == [0, 1]


def test_fewer_hosts_where_the_config_allows_it(tmp_path):
    reductions = []

    def reduce(processes):
        reductions.append(processes)
        return ("--set", f"mesh.shape.data={processes}") if processes == 2 else None

    pool = FakePool(4, {1: [lost(3, for_good=True)]})
    assert supervisor(tmp_path, pool, 4, reduce=reduce, host_seconds=5).run() == 0
    assert reductions == [3, 2]
    assert [(sorted(ranks), words) for _, ranks, words in pool.starts] == [
        ([0, 1, 2, 3], ()),
        ([0, 1], ("--set", "mesh.shape.data=2")),
    ]
    assert events(tmp_path, "reduced") == [(2, "reduced", None, "")]
    assert {e["JAX_NUM_PROCESSES"] for e in pool.environments[-2:]} == {"2"}


def test_the_first_attempt_has_all_hosts_even_if_fewer_are_allowed(tmp_path):
    slow = FakePool(2, broken={1})
    wait = slow.wait

    def late(timeout):  # the second host comes after four times the time that a later attempt would wait
        if slow.clock > 20 and slow.broken:
            slow.broken.clear()
            slow.queue.append((1, {"event": "host", "name": "node-1", "address": "10.0.0.1"}))
        return wait(timeout)

    slow.wait = late
    assert supervisor(tmp_path / "slow", slow, 2, reduce=lambda processes: (), host_seconds=5).run() == 0
    assert [sorted(ranks) for _, ranks, _ in slow.starts] == [[0, 1]]
    never = FakePool(2, broken={1})
    with pytest.raises(WorkError, match="1 of 2 hosts are left"):
        supervisor(tmp_path / "never", never, 2, reduce=lambda processes: (), host_seconds=5).run()
    assert not never.starts
    assert 50 <= never.clock < 60


def test_too_few_hosts_where_the_config_does_not(tmp_path):
    pool = FakePool(2, {1: [lost(1, for_good=True)]})
    with pytest.raises(WorkError, match=r"1 of 2 hosts are left.*\n.*node-1: lost: the node died"):
        supervisor(tmp_path, pool, 2, host_seconds=5).run()
    assert journal(tmp_path)[-1]["event"] == "stopped"


def test_what_comes_back_is_used_again(tmp_path):
    pool = FakePool(2, {1: [lost(1, for_good=True)], 2: [killed(0)]})
    instance = supervisor(tmp_path, pool, 2, reduce=lambda processes: (), host_seconds=5)
    play = pool._play

    def repaired(attempt):
        if attempt == 2:  # the node comes back while one host trains alone
            pool.broken.clear()
            pool.queue.append((1, {"event": "host", "name": "node-1", "address": "10.0.0.1"}))
        play(attempt)

    pool._play = repaired
    assert instance.run() == 0
    assert [sorted(ranks) for _, ranks, _ in pool.starts] == [[0, 1], [0], [0, 1]]


def test_an_error_of_the_code_is_not_tried_beyond_its_budget(tmp_path):
    pool = FakePool(3, {n: [killed(0, "user", "ValueError: no")] for n in range(1, 9)})
    with pytest.raises(
        WorkError, match=r"error in the training code ended the run 3 times; the budget is 2 restarts"
    ) as error:
        supervisor(tmp_path, pool, 2, budgets={"user": 2}).run()
    assert "ValueError: no" in str(error.value)
    assert len(pool.starts) == 3
    assert pool.starts[-1][1] == {0: 0, 1: 1}  # no host is to blame


def test_a_wrong_request_is_not_tried_again(tmp_path):
    pool = FakePool(2, {1: [killed(1, "request", "mesh.shape: does not multiply")]})
    with pytest.raises(RequestError, match="does not multiply"):
        supervisor(tmp_path, pool, 2).run()
    assert len(pool.starts) == 1


def test_deaths_without_a_newer_checkpoint_are_a_crash_loop(tmp_path):
    pool = FakePool(9, {n: [killed(n % 2)] for n in range(1, 99)}, saved=lambda attempt: 10 if attempt < 3 else 20)
    with pytest.raises(WorkError, match=r"4 deaths in a row without a newer checkpoint \(all from step 20\)"):
        supervisor(tmp_path, pool, 2, crash_loop=4, host_deaths=99).run()
    assert len(pool.starts) == 6  # two from step 10, four from step 20


def test_deaths_with_progress_are_none(tmp_path):
    pool = FakePool(4, {n: [killed(n % 2)] for n in range(1, 31)})
    assert supervisor(tmp_path, pool, 2, crash_loop=4, host_deaths=99).run() == 0
    assert len(pool.starts) == 31


def test_a_host_on_which_nothing_starts_is_left_out(tmp_path):
    pool = FakePool(3)
    cold = {"event": "cold", "code": 1, "message": "Traceback\nImportError: libtpu.so\n"}
    pool.queue += [(0, cold), (0, cold)]
    assert supervisor(tmp_path, pool, 2, host_deaths=2).run() == 0
    assert pool.starts[0][1] == {0: 1, 1: 2}
    (actual,) = [r for r in journal(tmp_path) if r["event"] == "set-aside"]
    assert "libtpu.so" in actual["reason"]


def test_sigterm_lets_the_trainers_save(tmp_path):
    pool = FakePool(2, {1: [killed(0, "preempted", "saved"), killed(1, "preempted", "saved")]})
    instance = supervisor(tmp_path, pool, 2)
    play = pool._play
    pool._play = lambda attempt: (instance.stop(signal.SIGTERM), play(attempt))
    assert instance.run() == 128 + signal.SIGTERM
    assert pool.signals == [(0, signal.SIGTERM), (1, signal.SIGTERM)]


def test_a_preempted_host_is_waited_for_while_it_saves(tmp_path):
    pool = FakePool(3, {1: [killed(0, "preempted", "saved"), killed(1, "preempted", "saved")]})
    instance = supervisor(tmp_path, pool, 2)
    assert instance.run() == 0
    assert instance.tally.counts == {"preempted": 1}


def test_several_processes_on_each_host_and_slices_of_a_tpu(tmp_path):
    pool = FakePool(3)
    assert supervisor(tmp_path, pool, 2, processes_per_host=2, slices=2).run() == 0
    assert pool.starts[0][1] == {0: 0, 1: 0, 2: 1, 3: 1}
    assert [e["MEGASCALE_SLICE_ID"] for e in pool.environments] == ["0", "0", "1", "1"]


def test_attempts_are_counted_on(tmp_path):
    (tmp_path / PROCESSES).write_text(json.dumps({"attempt": 7}) + '\n{"attempt": 9, "ti')
    pool = FakePool(2)
    supervisor(tmp_path, pool, 2).run()
    assert pool.starts[0][0] == 8


def test_deaths_that_arrive_together_are_summarized(tmp_path):
    peers = [killed(rank, "peer", "gloo: connection closed") for rank in range(29) if rank != 3]
    instance = supervisor(tmp_path, FakePool(30, {1: [*peers, killed(3)]}), 29)
    assert instance.run() == 0
    reports = [line for line in instance.lines if line.startswith("attempt 1: rank")]
    assert len(reports) == 8
    assert "killed by SIGKILL" in reports[0]
    assert "21 more ranks ended; processes.jsonl lists them" in instance.lines
    assert len(events(tmp_path, "exited")) == 29 + 29
