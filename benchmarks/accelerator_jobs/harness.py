"""Run the parts, each job in a separate process with a time limit. Does not import JAX.

Publishes the results after each job.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerator_jobs.jobs import Job, Part
from accelerator_jobs.machine import Sampler

STARTUP = 10.0
"""Minimum seconds left to start a job. A process needs this time to import JAX and find its device."""

POLL = 0.2
"""Seconds between two polls of a job."""


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows in the file of a job, and the number of unreadable lines.

    The last line may be incomplete while the job runs.
    """
    rows, unreadable = [], 0
    if not path.exists():
        return rows, unreadable
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "name" in row:
            rows.append(row)
        else:
            unreadable += 1
    return rows, unreadable


def command_of(job: Job, rows: Path, *, rehearsal: bool, seconds: float, python: str, earlier: Path) -> list[str]:
    """Return the command that runs a job."""
    command = [python, str(Path(__file__).parent / "job.py"), job.function, *job.options]
    command += ["--rows", str(rows), "--seconds", f"{seconds:.0f}", "--earlier", str(earlier)]
    return [*command, "--dry-run"] if rehearsal else command


def stop(process: subprocess.Popen[Any]) -> None:
    """Stop a job and its child processes, which share its session."""
    for number, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


class Run:
    """One run of the benchmark.

    Attributes:
        results: Results by part. `publish` rewrites them after each change.
    """

    def __init__(
        self,
        *,
        out: Path,
        minutes: float,
        rehearsal: bool,
        publish: Callable[[Sequence[Mapping[str, Any]]], None],
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ):
        self.out, self.rehearsal, self.python = out, rehearsal, python
        self.deadline = time.monotonic() + 60 * minutes
        # Without .pyc files, each process would compile a thousand modules at startup.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.environment = inherited | dict(environment or {})
        self.results: list[dict[str, Any]] = []
        self._publish = publish
        self._log = out / "log.txt"
        self._rows = out / "rows"
        self._rows.mkdir(parents=True, exist_ok=True)
        for stale in self._rows.glob("*.jsonl"):
            stale.unlink()
        self._log.write_text("")

    def run(self, parts: Sequence[Part]) -> bool:
        """Run the parts in order, even if jobs fail. Return whether no job failed."""
        for index, part in enumerate(parts):
            weights = sum(p.weight for p in parts[index:])
            limit = (self.deadline - time.monotonic()) * part.weight / weights
            self._run_part(part, time.monotonic() + limit)
        return all(job["status"] == "done" for part in self.results for job in part["jobs"])

    def _run_part(self, part: Part, deadline: float) -> None:
        result: dict[str, Any] = {"part": part.name, "title": part.title, "jobs": []}
        self.results.append(result)
        for index, job in enumerate(part.jobs):
            share = job.weight / sum(j.weight for j in part.jobs[index:])
            seconds = (deadline - time.monotonic()) * share
            entry: dict[str, Any] = {
                "job": job.name,
                "status": "running",
                "limit_seconds": round(seconds, 1),
                "rows": [],
            }
            result["jobs"].append(entry)
            if seconds < STARTUP and not self.rehearsal:
                entry |= {"status": "not started", "reason": f"only {max(0, seconds):.0f} s were left for it"}
                self._publish(self.results)
                continue
            self._run_job(job, seconds, entry)
            print(f"{part.name}/{job.name}: {entry['status']} after {entry['seconds']:.1f} s", file=sys.stderr)

    def _run_job(self, job: Job, seconds: float, entry: dict[str, Any]) -> None:
        path = self._rows / f"{job.name}.jsonl"
        command = command_of(
            job, path, rehearsal=self.rehearsal, seconds=seconds, python=self.python, earlier=self._rows
        )
        entry["command"] = " ".join(command)
        started, number = time.monotonic(), -1
        with self._log.open("ab") as log:
            log.write(f"\n== {entry['command']}\n".encode())
            log.flush()
            start = log.tell()
            with Sampler(enabled=not self.rehearsal) as sampler:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    start_new_session=True,
                )
                while process.poll() is None and time.monotonic() - started < seconds:
                    time.sleep(POLL)
                    rows, _ = read_rows(path)
                    if len(rows) != number:
                        number, entry["rows"] = len(rows), rows
                        self._publish(self.results)
                overdue = process.poll() is None
                if overdue:
                    stop(process)
            entry["device"] = sampler.summary()
        self._conclude(entry, path, process.returncode, overdue, start)
        entry["seconds"] = round(time.monotonic() - started, 2)
        self._publish(self.results)

    def _conclude(self, entry: dict[str, Any], path: Path, code: int, overdue: bool, start: int) -> None:
        """Return the status and reason, from the exit code and the rows of a job."""
        entry["rows"], unreadable = read_rows(path)
        failures = [f"{r['name']}: {r['error']}" for r in entry["rows"] if r.get("error")]
        if overdue:
            entry |= {"status": "timed out", "reason": f"stopped after its limit of {entry['limit_seconds']} s"}
        elif code:
            entry |= {"status": "failed", "reason": f"exit code {code}", "output": self._tail(start)}
        elif unreadable and not overdue:
            entry |= {"status": "failed", "reason": f"{unreadable} lines of its result are not rows"}
        elif not entry["rows"]:
            entry |= {"status": "failed", "reason": "it wrote no result", "output": self._tail(start)}
        elif failures:
            entry |= {"status": "failed", "reason": "; ".join(failures)[:600]}
        else:
            entry["status"] = "done"

    def _tail(self, start: int, size: int = 1500) -> str:
        """Return the end of the last job's output."""
        with self._log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")[-size:]
