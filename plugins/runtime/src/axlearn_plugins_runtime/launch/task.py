"""A trainer started by a scheduler. It finds its rank, trains, and exits with a code that identifies the kind of failure.

    python -m axlearn_plugins_runtime.launch.task slurm|kubernetes|sky train EXPERIMENT ...

The rendered script or manifest sets these variables: `AXLEARN_ATTEMPT` (a number that determines the coordinator's port),
`AXLEARN_COORDINATOR` (host), `AXLEARN_PROCESSES`, `AXLEARN_LOCAL_CHIPS` (chips of the host, if several processes share them),
`AXLEARN_KEEP` (variables to inherit, separated by spaces), `AXLEARN_EXITS` (folder for exit codes), and
`AXLEARN_EVENTS` (path of `processes.jsonl`).
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
"""Exit code by kind of failure. A preemption after saving exits with 128 + 15."""
FINAL = (1, 2, 65)
"""Exit codes after which a retry would fail in the same way."""
FIRST_PORT, PORTS = 24576, 8192
"""Ports of the coordinator, below Linux's ephemeral ports."""


def coordinator_port(attempt: int) -> int:
    """Return the port for an attempt.

    Ports differ between attempts, because a process that joins the coordinator of an older attempt would end the job.
    """
    return FIRST_PORT + attempt % PORTS


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an `srun` task."""
    local, tasks = int(environ["SLURM_LOCALID"]), int(environ.get("SLURM_NTASKS_PER_NODE") or 1)
    place = _place(environ, job=f"slurm-{environ['SLURM_JOB_ID']}", rank=int(environ["SLURM_PROCID"]))
    if chips := int(environ.get("AXLEARN_LOCAL_CHIPS") or 0):
        per_task = chips // tasks
        place["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(i) for i in range(local * per_task, (local + 1) * per_task))
    return place


def kubernetes_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a pod in a JobSet, which has a job for each slice and a pod for each host."""
    slices, slice_index = int(environ.get("AXLEARN_SLICES") or 1), int(environ.get("AXLEARN_SLICE") or 0)
    hosts = int(environ["AXLEARN_PROCESSES"]) // slices
    rank = slice_index * hosts + int(environ["JOB_COMPLETION_INDEX"])
    place = _place(environ, job=f"jobset-{environ['AXLEARN_JOBSET']}", rank=rank)
    if slices > 1:
        place |= {"MEGASCALE_NUM_SLICES": str(slices), "MEGASCALE_SLICE_ID": str(slice_index)}
        place["MEGASCALE_COORDINATOR_ADDRESS"] = environ["AXLEARN_COORDINATOR"]
    return place


def sky_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a node in a SkyPilot task. The task id differs between submissions and recoveries."""
    first = environ["SKYPILOT_NODE_IPS"].split()[0]
    task = environ.get("SKYPILOT_TASK_ID", "")
    attempt = sum(task.encode()) + int(environ.get("AXLEARN_ATTEMPT") or 0)
    variables = {"AXLEARN_COORDINATOR": first, "AXLEARN_ATTEMPT": str(attempt)}
    variables["AXLEARN_PROCESSES"] = environ["SKYPILOT_NUM_NODES"]
    return _place({**environ, **variables}, job=f"sky-{task}", rank=int(environ["SKYPILOT_NODE_RANK"]))


ENVIRONMENTS: Mapping[str, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "slurm": slurm_environment,
    "kubernetes": kubernetes_environment,
    "sky": sky_environment,
}
"""For each scheduler, the function that derives a process's environment from the scheduler's variables."""


def _place(environ: Mapping[str, str], *, job: str, rank: int) -> dict[str, str]:
    port = coordinator_port(int(environ["AXLEARN_ATTEMPT"]))
    return attempt_environment(
        job=job,
        coordinator=f"{environ['AXLEARN_COORDINATOR']}:{port}",
        processes=int(environ["AXLEARN_PROCESSES"]),
        rank=rank,
    )


def exit_code(end: Exit) -> tuple[int, str]:
    """Return (exit code, reason) of a run."""
    kind, reason = classify_exit(end, "")
    return EXIT_CODES.get(kind, end.code), reason


def main() -> None:
    """Train as the rank that the scheduler assigned."""
    scheduler, *words = sys.argv[1:]
    try:
        environment = ENVIRONMENTS[scheduler](os.environ)
    except KeyError as missing:
        sys.exit(
            f"error: {missing} is not set: this command must be run by the script or manifest that "
            f"`axlearn launch --on {scheduler}` writes"
        )
    except (ValueError, IndexError, RequestError) as error:
        sys.exit(f"error: {error}")
    inherited = trainer_environment(os.environ, os.environ.get("AXLEARN_KEEP", "").split())
    exits, events = os.environ.get("AXLEARN_EXITS"), os.environ.get("AXLEARN_EVENTS")
    attempt, rank = int(os.environ.get("AXLEARN_ATTEMPT") or 0), int(environment["JAX_PROCESS_ID"])
    assign_environment(inherited | environment, only=True)
    _record(events, attempt, rank, "started", "")
    code, reason = exit_code(run(words))
    _record(events, attempt, rank, "finished" if code == 0 else "exited", reason)
    if exits:
        with contextlib.suppress(OSError):
            (Path(exits) / f"{attempt}-{rank}").write_text(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a normal exit would wait for peers in JAX


def _record(events: str | None, attempt: int, rank: int, event: str, reason: str) -> None:
    if not events:
        return
    record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "attempt": attempt, "rank": rank}
    record |= {"host": socket.gethostname(), "pid": os.getpid(), "event": event, "reason": reason}
    with contextlib.suppress(OSError):  # events are informational and must not stop training
        Path(events).parent.mkdir(parents=True, exist_ok=True)
        with Path(events).open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
