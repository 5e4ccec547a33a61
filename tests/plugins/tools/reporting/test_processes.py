"""Deaths of processes as incidents of a report."""

from axlearn_plugins_tools.reporting.processes import process_incidents


def record(second, event, rank=None, host="", pid=None, reason="", attempt=1):
    time = f"2026-01-01T00:00:{second:02d}.000+00:00"
    return {"time": time, "attempt": attempt, "rank": rank, "host": host, "pid": pid, "event": event, "reason": reason}


def test_a_death_says_what_took_the_place_and_what_it_cost():
    records = [
        record(0, "started", 0, "a", 1),
        record(0, "started", 1, "b", 2),
        record(5, "stepping", reason="from step 0"),
        record(10, "exited", 1, "b", 2, "killed by SIGKILL"),
        record(10, "exited", 0, "a", 1, "SIGABRT: it lost another process"),  # follows from the first
        record(10, "killed", 0, "a", 1, "rank 1 ended"),
        record(11, "replaced", 1, "c", reason="replaces b"),
        record(18, "stepping", reason="from step 40", attempt=2),
        record(20, "exited", 0, "a", 3, "finished", 2),
    ]
    (incident,) = process_incidents(records)
    assert incident["rule"] == "exited"
    assert incident["message"] == (
        "rank 1 on b, process 2: killed by SIGKILL; c replaces it; training resumed after 8.0 s, from step 40"
    )


def test_notices_and_what_never_trained_again():
    records = [
        record(1, "lost", 1, "b", reason="the node died"),
        record(2, "set-aside", host="b", reason="set aside after 3 deaths"),
        record(3, "reduced", reason="1 of 2 hosts train"),
        record(4, "stopped", reason="a crash loop"),
    ]
    assert [i["rule"] for i in process_incidents(records)] == ["lost", "set-aside", "reduced", "stopped"]
    assert process_incidents([{"event": "exited"}, {}])[0]["message"]  # of a damaged file
