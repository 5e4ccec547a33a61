"""One trainer under a scheduler that starts processes itself: finds its rank, trains, and ends with an exit code by kind.

    python -m axlearn_plugins_runtime.launch.task slurm|kubernetes|sky train EXPERIMENT ...

Variables that the rendered script or manifest sets: `AXLEARN_ATTEMPT` (a number; the coordinator's port follows from it),
`AXLEARN_COORDINATOR` (host), `AXLEARN_PROCESSES`, `AXLEARN_LOCAL_CHIPS` (chips of the host, where several processes share them),
`AXLEARN_KEEP` (names that always stay, separated by spaces), `AXLEARN_EXITS` (a folder for exit codes), and
`AXLEARN_EVENTS` (a `processes.jsonl`).
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from axlearn_core.compat import assign_environment
from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.launch.environment import attempt_environment, trainer_environment
from axlearn_plugins_runtime.launch.exits import Exit, classify_exit
from axlearn_plugins_runtime.launch.worker import run

EXIT_CODES = {"request": 2, "user": 1, "data": 65, "infrastructure": 74, "peer": 74, "stalled": 75}
"""How a run that failed tells the scheduler why; 128 + 15 is a preemption after saving."""
FINAL = (1, 2, 65)
"""Exit codes that another attempt would not change."""
FIRST_PORT, PORTS = 24576, 8192
"""The coordinator's ports: below those that Linux gives to connections."""


def coordinator_port(attempt: int) -> int:
    """Another port for each attempt: a process that meets the coordinator of an older one ends everybody."""
    return FIRST_PORT + attempt % PORTS


def slurm_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a task of `srun`."""
    local, tasks = int(environ["SLURM_LOCALID"]), int(environ.get("SLURM_NTASKS_PER_NODE") or 1)
    place = _place(environ, job=f"slurm-{environ['SLURM_JOB_ID']}", rank=int(environ["SLURM_PROCID"]))
    if chips := int(environ.get("AXLEARN_LOCAL_CHIPS") or 0):
        own = chips // tasks
        place["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(i) for i in range(local * own, (local + 1) * own))
    return place


def kubernetes_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a pod of a JobSet: one job for each slice, one pod for each host."""
    slices, slice_index = int(environ.get("AXLEARN_SLICES") or 1), int(environ.get("AXLEARN_SLICE") or 0)
    hosts = int(environ["AXLEARN_PROCESSES"]) // slices
    rank = slice_index * hosts + int(environ["JOB_COMPLETION_INDEX"])
    place = _place(environ, job=f"jobset-{environ['AXLEARN_JOBSET']}", rank=rank)
    if slices > 1:
        place |= {"MEGASCALE_NUM_SLICES": str(slices), "MEGASCALE_SLICE_ID": str(slice_index)}
        place["MEGASCALE_COORDINATOR_ADDRESS"] = environ["AXLEARN_COORDINATOR"]
    return place


def sky_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a node of a SkyPilot task. Its id differs between submissions and recoveries."""
    first = environ["SKYPILOT_NODE_IPS"].split()[0]
    task = environ.get("SKYPILOT_TASK_ID", "")
    attempt = sum(task.encode()) + int(environ.get("AXLEARN_ATTEMPT") or 0)
    own = {"AXLEARN_COORDINATOR": first, "AXLEARN_ATTEMPT": str(attempt)}
    own["AXLEARN_PROCESSES"] = environ["SKYPILOT_NUM_NODES"]
    return _place({**environ, **own}, job=f"sky-{task}", rank=int(environ["SKYPILOT_NODE_RANK"]))


PLACES: Mapping[str, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "slurm": slurm_place,
    "kubernetes": kubernetes_place,
    "sky": sky_place,
}
"""Scheduler -> where a process joins the job, from the scheduler's variables."""


def _place(environ: Mapping[str, str], *, job: str, rank: int) -> dict[str, str]:
    port = coordinator_port(int(environ["AXLEARN_ATTEMPT"]))
    return attempt_environment(
        job=job,
        coordinator=f"{environ['AXLEARN_COORDINATOR']}:{port}",
        processes=int(environ["AXLEARN_PROCESSES"]),
        rank=rank,
    )


def exit_code(end: Exit) -> tuple[int, str]:
    """(exit code, reason) of a run."""
    kind, reason = classify_exit(end, "")
    return EXIT_CODES.get(kind, end.code), reason


def main() -> None:
    """Trains as the rank that the scheduler says."""
    scheduler, *words = sys.argv[1:]
    try:
        own = PLACES[scheduler](os.environ)
    except KeyError as missing:
        sys.exit(
            f"error: {missing} is not set: this command is started by what `axlearn launch --on {scheduler}` renders"
        )
    except (ValueError, IndexError, RequestError) as error:
        sys.exit(f"error: {error}")
    inherited = trainer_environment(os.environ, os.environ.get("AXLEARN_KEEP", "").split())
    exits, events = os.environ.get("AXLEARN_EXITS"), os.environ.get("AXLEARN_EVENTS")
    attempt, rank = int(os.environ.get("AXLEARN_ATTEMPT") or 0), int(own["JAX_PROCESS_ID"])
    assign_environment(inherited | own, only=True)
    _record(events, attempt, rank, "started", "")
    code, reason = exit_code(run(words))
    _record(events, attempt, rank, "finished" if code == 0 else "exited", reason)
    if exits:
        with contextlib.suppress(OSError):
            (Path(exits) / f"{attempt}-{rank}").write_text(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # JAX would wait for its peers at exit


def _record(events: str | None, attempt: int, rank: int, event: str, reason: str) -> None:
    if not events:
        return
    record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "attempt": attempt, "rank": rank}
    record |= {"host": socket.gethostname(), "pid": os.getpid(), "event": event, "reason": reason}
    with contextlib.suppress(OSError):  # the events are for people: training goes on without them
        Path(events).parent.mkdir(parents=True, exist_ok=True)
        with Path(events).open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
