"""The agent on each host: keeps warm processes, assigns ranks to them, watches them, and ends them. Does not need Ray."""

import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.compat import glibc_tunables
from axlearn_plugins_runtime.job.progress import PROGRESS, Progress
from axlearn_plugins_runtime.launch.environment import trainer_environment
from axlearn_plugins_runtime.launch.exits import Exit, classify_exit
from axlearn_plugins_runtime.launch.run_files import place_files

POLL_SECONDS = 0.1
REPORT_SECONDS = 1.0
TAIL = 4000


@attrs.frozen(kw_only=True)
class Setup:
    """The settings for an agent.

    Attributes:
        words: Arguments of `axlearn`. If there is a `document`, the agent replaces the run file's path with that of its own copy.
        document: Content of the run file, which the agent writes to its own folder.
        bases: Contents of the run files that `document` is based on, by name. The agent writes them to the same folder.
        environment: Environment variables of every trainer.
        logs: Folder for the trainers' output, or None for the agent's own folder.
        processes: Trainer processes per host.
        keep: Environment variables that trainers inherit even if their names belong to a scheduler.
    """

    words: tuple[str, ...]
    document: str | None = None
    bases: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    logs: str | None = None
    processes: int = 1
    keep: tuple[str, ...] = ()


class Agent:
    """Keeps `processes` warm workers on its host.

    `prepare`, `start` and `signal` return immediately. `kill` waits until the processes have ended, and `events` waits for
    events.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.folder = Path(tempfile.mkdtemp(prefix="axlearn-launch-"))
        self.words = self._local_words()
        self.modules = Path(setup.logs or self.folder) / "modules.json"
        self.warm: list[_Worker] = []
        self.running: dict[int, _Worker] = {}
        self._events: collections.deque[dict[str, Any]] = collections.deque()
        self._condition = threading.Condition()
        self._closed = threading.Event()
        # Use a single thread for the life of the agent, because workers die with the thread that started them.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
        self._number = 0
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Return the host's name and the agent's process id."""
        return {"host": socket.gethostname(), "pid": os.getpid()}

    def prepare(self) -> None:
        """Start warm workers until there are `processes` of them. The `ready` event follows."""
        self._starter.submit(self._prepare)

    def coordinator(self, address: str) -> str:
        """Return an address with a free port on this host, for the coordinator of one attempt."""
        with socket.socket() as free:
            free.bind((address, 0))
            return f"{address}:{free.getsockname()[1]}"

    def start(self, attempt: int, ranks: Mapping[int, Mapping[str, str]], words: Sequence[str]) -> None:
        """Assign ranks to warm workers, or to new ones. The `started` event contains each worker's process id.

        Args:
            attempt: Number of the attempt.
            ranks: Environment for each rank on this host.
            words: Arguments to append to those of the setup.
        """
        self._starter.submit(self._start, attempt, dict(ranks), tuple(words))

    def signal(self, number: int) -> None:
        """Send every trainer a signal, such as SIGTERM for a preemption."""
        for worker in list(self.running.values()):
            worker.signal(number)

    def kill(self) -> list[int]:
        """Kill the trainers of the attempt and wait until they have exited. Return the ranks that were alive."""
        workers, self.running = self.running, {}
        alive = sorted(rank for rank, worker in workers.items() if not worker.exited.is_set())
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.exited.wait(30)
        return alive

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Return the events since the last call. Wait at most `timeout` seconds for an event."""
        with self._condition:
            self._condition.wait_for(lambda: self._events, timeout)
            events = list(self._events)
            self._events.clear()
            return events

    def tail(self, rank: int, attempt: int) -> str:
        """Return the last lines of a rank's output."""
        return _tail(self._log(attempt, rank))

    def close(self) -> None:
        """Kill every process."""
        self._closed.set()
        self.kill()
        self._starter.submit(lambda: [worker.kill() for worker in self.warm]).result()
        self._starter.shutdown()

    def _add_event(self, event: str, **values: Any) -> None:
        with self._condition:
            self._events.append({"event": event, **values})
            self._condition.notify_all()

    def _local_words(self) -> tuple[str, ...]:
        words = self.setup.words
        if self.setup.document is None:
            return words
        files = place_files(words[1], self.setup.document, self.setup.bases, str(self.folder))
        for path, text in files.items():
            Path(path).write_text(text, encoding="utf-8")
        return words[0], next(iter(files)), *words[2:]

    def _log(self, attempt: int, rank: int) -> Path:
        folder = Path(self.setup.logs) if self.setup.logs else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"attempt-{attempt:04d}-rank-{rank}.txt"

    def _prepare(self) -> None:
        self.warm = [w for w in self.warm if not w.exited.is_set()]
        if 0 in self.running and self.running[0].steps and not self.modules.exists():
            self.running[0].send({"list_modules": str(self.modules)})
        while len(self.warm) < self.setup.processes and not self._closed.is_set():
            self._number += 1
            self.warm.append(_Worker(self, self._number))
        self._report_ready()

    def _report_ready(self) -> None:
        ready = [w for w in self.warm if w.ready.is_set()]
        if len(ready) >= self.setup.processes:
            self._add_event("ready", pids=[w.process.pid for w in ready])

    def _start(self, attempt: int, ranks: Mapping[int, Mapping[str, str]], words: Sequence[str]) -> None:
        for rank, environment in ranks.items():
            self.warm = [w for w in self.warm if not w.exited.is_set()]
            ready = next((w for w in self.warm if w.ready.is_set()), None) or next(iter(self.warm), None)
            if ready is None:
                self._number += 1
                ready = _Worker(self, self._number)
            else:
                self.warm.remove(ready)
            self.running[rank] = ready
            ready.assign(attempt, rank, self._log(attempt, rank), environment, (*self.words, *words))
            self._add_event("started", attempt=attempt, rank=rank, pid=ready.process.pid)

    def handle_exit(self, worker: "_Worker", code: int) -> None:
        """Report the exit of a worker."""
        if worker.rank is None:
            if not self._closed.is_set() and not worker.killed:
                self._add_event("cold", code=code, message=worker.output())
            return
        if worker.killed:
            return
        end = attrs.evolve(worker.end, code=code) if worker.end else Exit(code=code)
        kind, reason = classify_exit(end, _tail(worker.log), worker.phase)
        if worker.rank == 0 and (text := worker.new_output()):
            self._add_event("output", text=text)
        self._add_event("exited", attempt=worker.attempt, rank=worker.rank, kind=kind, reason=reason, code=code)

    def handle_ready(self) -> None:
        """Report ready workers after one of them finished its imports."""
        with contextlib.suppress(RuntimeError):  # the agent was closed
            self._starter.submit(self._report_ready)

    def _watch(self) -> None:
        reports: dict[int, tuple[Any, ...]] = {}
        last = 0.0
        while not self._closed.wait(POLL_SECONDS):
            now = time.monotonic()
            for rank, worker in list(self.running.items()):
                if rank == 0 and (text := worker.new_output()):
                    self._add_event("output", text=text)
                progress, stopped = worker.read_status()
                # Steps are reported once a second, and other changes immediately.
                key = (worker.attempt, progress[2], worker.steps > 0, stopped)
                if reports.get(rank) == key and now - last < REPORT_SECONDS:
                    continue
                reports[rank] = key
                self._add_event(
                    "progress",
                    attempt=worker.attempt,
                    rank=rank,
                    step=progress[1],
                    steps=worker.steps,
                    phase=progress[2],
                    silent=now - progress[0],
                    stopped=stopped,
                )
            if now - last >= REPORT_SECONDS:
                last = now
                self._share_modules()

    def _share_modules(self) -> None:
        """Send warm workers the list of modules that the run has imported. Rank 0 writes it, possibly on a different host."""
        for worker in list(self.warm):
            if not worker.imported and self.modules.exists():
                worker.imported = True
                worker.send({"import": str(self.modules)})


class _Worker:
    """A process that runs `worker.py`."""

    def __init__(self, agent: Agent, number: int):
        self.agent = agent
        self.progress_file = agent.folder / f"progress-{number}"
        self.first_log = agent.folder / f"worker-{number}.txt"
        self.ready, self.exited, self.imported = threading.Event(), threading.Event(), False
        self.attempt: int | None = None
        self.rank: int | None = None
        self.log, self.killed = self.first_log, False
        self.end: Exit | None = None
        self.phase, self.steps = "start", 0
        self._first_step: int | None = None
        self._since = time.monotonic()
        self._stopped: float | None = None
        self._output_offset = 0
        parent_end, child_end = socket.socketpair()
        environment = trainer_environment(os.environ, agent.setup.keep) | dict(agent.setup.environment)
        environment |= {PROGRESS: str(self.progress_file), "PYTHONUNBUFFERED": "1"}
        environment["GLIBC_TUNABLES"] = glibc_tunables(environment)
        with self.first_log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "axlearn_plugins_runtime.launch.worker", str(child_end.fileno()), *agent.words],
                env=environment,
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child_end.close()
        self._channel = parent_end
        threading.Thread(target=self._listen, name=f"worker-{number}", daemon=True).start()

    def assign(self, attempt: int, rank: int, log: Path, environment: Mapping[str, str], words: Sequence[str]) -> None:
        """Assign a rank to the process."""
        self.attempt, self.rank, self.log, self._since = attempt, rank, log, time.monotonic()
        self.send({"words": list(words), "environment": dict(environment), "log": str(log)})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the process. If it has exited, `Agent.handle_exit` reports it."""
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def read_status(self) -> tuple[tuple[float, int, str], float]:
        """Return ((start of the phase, finished steps, phase), seconds that a signal has stopped the process)."""
        progress = Progress.read(self.progress_file)
        if progress is None:
            return (self._since, 0, "start"), self._seconds_stopped()
        _, step, phase = progress
        self.phase = phase
        if phase in ("compile", "input", "rollout", "step", "save", "evaluate") and self._first_step is None:
            self._first_step = step
        self.steps = step - (step if self._first_step is None else self._first_step)
        return progress, self._seconds_stopped()

    def signal(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its children."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def output(self) -> str:
        """Return what the process printed before it was assigned a rank."""
        return _tail(self.first_log)

    def new_output(self) -> str:
        """Return the output since the last call."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._output_offset)
            data = file.read(1 << 16)
            self._output_offset += len(data)
            return data.decode(errors="replace")
        return ""

    def _seconds_stopped(self) -> float:
        """Return how long a stop signal such as SIGSTOP has stopped the process. Returns 0 on systems other than Linux."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        if state not in ("T", "t"):
            self._stopped = None
            return 0.0
        self._stopped = self._stopped or time.monotonic()
        return time.monotonic() - self._stopped

    def _listen(self) -> None:
        with self._channel.makefile("r", encoding="utf-8") as reader, contextlib.suppress(OSError, ValueError):
            for line in reader:
                message = json.loads(line)
                if "ready" in message:
                    self.ready.set()
                    self.agent.handle_ready()
                else:
                    self.end = Exit(code=message["exit"], kind=message["kind"], message=message["message"])
        code = self.process.wait()
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its data workers
        self.exited.set()
        self.progress_file.unlink(missing_ok=True)
        self.agent.handle_exit(self, code)


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - TAIL))
            return opened.read().decode(errors="replace")
    except OSError:
        return ""
