"""Simulate the parts of a job, and count what they cost: saves, restores, the start of a job, heartbeats, and the launcher.

Some processes run the real code in threads, with a coordinator and a storage in memory. The other processes only exist as the
values and files that they would have written. Process 0 always runs, so that its cost includes the whole job.
"""

import re
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint import ShardedCheckpointer, stream
from axlearn_core.checkpoint.barrier import share_from_first
from axlearn_core.checkpoint.manifest import EXTRA, STATE, ArrayInfo, Checkpoints
from axlearn_core.checkpoint.state import agree
from axlearn_core.train.job_checks import check_same_data
from axlearn_plugins_runtime.job.peers import BEATS, PeerWatch, beat_pause
from axlearn_plugins_runtime.scale.coordinator import SimulatedCoordinator
from axlearn_plugins_runtime.scale.sharded_state import SimulatedArray, describe_state, make_state, render_part
from axlearn_plugins_runtime.scale.simulated_storage import SimulatedFiles, SimulatedStorage
from axlearn_plugins_runtime.scale.storage_models import StorageModel, Use
from axlearn_plugins_runtime.scale.supervision import START, supervise_simulated

SAMPLE = 8
"""Number of processes that run the real code."""
MESSAGE_SECONDS, SERVED = 270e-6, 4
"""Seconds of a request to the coordinator, measured between two processes on two CPU cores, and requests that it handles at a time
(assumed)."""
WAIT_SECONDS = 3600


@attrs.frozen(kw_only=True)
class Cost:
    """The cost of one part of a job with one number of processes.

    Attributes:
        part: Name of the part.
        processes: Number of processes.
        use: Requests to the storage of the process with the most requests, other than process 0.
        messages: Messages between this process and the coordinator.
        message_bytes: Bytes of these messages.
        seconds: Modeled seconds of a process, without the time for which it waits for process 0.
        first_use: Requests to the storage of process 0.
        job_messages: Messages that the coordinator handles.
        job_message_bytes: Bytes that the coordinator handles.
        first_seconds: Modeled seconds of process 0 and the coordinator, without `first_cpu_seconds`.
        first_cpu_seconds: Measured seconds of Python on process 0, with the threads of the other simulated processes.
        first_memory: Measured peak of the memory of process 0 and one other process, in bytes.
        decisions: Event -> seconds until the launcher has told all hosts to start again. Only for the part `launch`, in which a
            host is a process and the launcher is the coordinator.
    """

    part: str
    processes: int
    use: Use
    messages: int
    message_bytes: int
    seconds: float
    first_use: Use
    job_messages: int
    job_message_bytes: int
    first_seconds: float
    first_cpu_seconds: float
    first_memory: int
    decisions: Mapping[str, float] = attrs.field(factory=dict)


class SimulatedCheckpointer(ShardedCheckpointer):
    """The default checkpointer, for arrays of a simulated job."""

    def save_part(self, step: int, state: Mapping[str, SimulatedArray]) -> None:
        """Save the part of a process in this thread. See `StorageCheckpointer.save`."""
        if not self._begin(step):
            raise AssertionError
        arrays: Any = state
        self._copy(step, arrays)()
        if jax.process_index() == 0:
            described: dict[str, ArrayInfo] = describe_state(state)
            self._commit(step, described, {EXTRA: "{}", "config.yaml": "x" * 10_000}, {})
        agree(None, None)

    def restore_part(self, state: Mapping[str, SimulatedArray]) -> None:
        """Find the newest checkpoint, verify it, and read the boxes of a process to host memory. See `restore`."""
        step = self.steps()[-1]
        checkpoint = self._verify_step(step)
        self.read_extra(step)
        storage, root = self.place.storage, f"{self.place.folder}{step}/"
        index = stream.ArrayIndex(storage, root, checkpoint).find({path: [x.box] for path, x in state.items()})
        boxes = {path: [state[path].box] for path in index}
        for path, values in stream.read_boxes(storage, f"{root}{STATE}/", index, boxes):
            (value,) = values.values()
            expected = state[path].process if state[path].axis is not None else 0
            if value.size and not (value == expected).all():
                raise AssertionError(f"{path}: restored a different value")
        agree(None, None)


class SimulatedJob:
    """A job with a number of processes, of which a sample runs.

    Args:
        processes: Number of processes.
        arrays: Number of sharded arrays in the training state.
        state_bytes: Bytes of the training state on each process.
        sample: Number of processes that run the real code.
    """

    def __init__(self, processes: int, *, arrays: int, state_bytes: int, sample: int = SAMPLE):
        self.processes, self.arrays, self.state_bytes = processes, arrays, state_bytes
        count = min(sample, processes)
        self.ranks = sorted({round(i * (processes - 1) / max(count - 1, 1)) for i in range(count)})
        self.coordinator = SimulatedCoordinator(self._stand_in)
        self.files = SimulatedFiles()
        self.storages = {rank: SimulatedStorage(self.files) for rank in self.ranks}
        self._missing = set(range(processes)) - set(self.ranks)

    def run(self, call: Callable[[int], None], values: Mapping[str, bytes] | None = None) -> float:
        """Run a function on the processes of the sample, each in a thread. Return the seconds of process 0.

        Args:
            call: Function of the index of a process.
            values: Values that the coordinator has at the beginning.
        """
        self.coordinator.start(values or {})
        for storage in self.storages.values():
            storage.use = Use()
        seconds = 0.0

        def run(rank: int) -> None:
            nonlocal seconds
            begin = time.monotonic()
            self.coordinator.run_as(rank, lambda: call(rank))
            if rank == 0:
                seconds = time.monotonic() - begin

        with self.coordinator.replace_client(self.processes), ThreadPoolExecutor(len(self.ranks)) as pool:
            for future in [pool.submit(run, rank) for rank in self.ranks]:
                future.result(WAIT_SECONDS)
        return seconds

    def state(self, rank: int) -> dict[str, SimulatedArray]:
        """Return the training state of a process."""
        return make_state(self.processes, rank, arrays=self.arrays, state_bytes=self.state_bytes)

    def save(self, step: int) -> float:
        """Save a checkpoint, and delete the one before. Return the seconds of process 0."""

        def save(rank: int) -> None:
            with_checkpointer(self.storages[rank], lambda one: one.save_part(step, self.state(rank)))

        seconds = self.run(save)
        for rank in self._missing:
            self.files.data[f"{step}/{STATE}/weights/{rank}-0.bin"] = b""
        return seconds

    def restore(self) -> float:
        """Restore the newest checkpoint. Return the seconds of process 0."""

        def restore(rank: int) -> None:
            with_checkpointer(self.storages[rank], lambda one: one.restore_part(self.state(rank)))

        return self.run(restore)

    def join(self) -> float:
        """Compare the configs and the data of all processes, and share a value. Return the seconds of process 0."""
        facts = {f"layer{i}.attention": "x" * 60 for i in range(200)}

        def join(rank: int) -> None:
            check_same_data(facts)
            share_from_first("attempt", "start")
            agree(None, None)

        return self.run(join)

    def watch(self) -> float:
        """Send one heartbeat from each process, and check them on process 0. Return the seconds of process 0."""
        pause = beat_pause(self.processes)
        beats = {f"{BEATS}{rank}": b"1 on a-host-of-the-job (process 123456)" for rank in self._missing}

        def watch(rank: int) -> None:
            PeerWatch("runs/simulated", notify=print).beat(self.coordinator, 1, pause)

        return self.run(watch, beats)

    def _stand_in(self, key: str) -> bytes | None:
        """Return the value that a process outside of the sample would have written."""
        if match := re.fullmatch(r"axlearn/saves/\d+/(\d+)", key):
            rank = int(match[1])
            return render_part(self.state(rank)) if rank in self._missing else None
        if (match := re.fullmatch(r"axlearn/(\d+)/(\d+)", key)) and int(match[2]) in self._missing:
            return self.coordinator.peek(f"axlearn/{match[1]}/{self.ranks[-1]}", WAIT_SECONDS)
        return None


def with_checkpointer(storage: SimulatedStorage, call: Callable[[SimulatedCheckpointer], None]) -> None:
    """Call a function with a checkpointer that keeps one checkpoint in a storage."""
    with tempfile.TemporaryDirectory() as directory:
        one = SimulatedCheckpointer(ShardedCheckpointer.Config(keep_last=1), directory=directory)
    one.place = Checkpoints(storage, "the simulated storage")
    one.run = "simulated"
    try:
        call(one)
    finally:
        one.close()


PARTS: Mapping[str, Callable[[SimulatedJob], float]] = {
    "save": lambda job: job.save(2),
    "restore": lambda job: job.restore(),
    "join": lambda job: job.join(),
    "watch": lambda job: job.watch(),
}
"""Functions that run a part of a job, and return the seconds of process 0."""
LAUNCH = "launch"
"""Name of the part that simulates the launcher."""


def simulate(
    parts: Sequence[str],
    processes: int,
    model: StorageModel,
    *,
    arrays: int = 45,
    state_bytes: int = 16 * 2**20,
    sample: int = SAMPLE,
) -> list[Cost]:
    """Simulate parts of a job.

    Args:
        parts: Names in `PARTS`, or `LAUNCH`.
        processes: Number of processes.
        model: Model of the storage.
        arrays: Number of sharded arrays in the training state.
        state_bytes: Bytes of the training state on each process.
        sample: Number of processes that run the real code.
    """
    job = SimulatedJob(processes, arrays=arrays, state_bytes=state_bytes, sample=sample)
    small = SimulatedJob(processes, arrays=arrays, state_bytes=0, sample=2)
    if {"save", "restore"} & {*parts}:
        job.save(1)
        small.save(1)
    return [_measure_launch(processes) if part == LAUNCH else _measure(part, job, small, model) for part in parts]


def _measure(part: str, job: SimulatedJob, small: SimulatedJob, model: StorageModel) -> Cost:
    cpu_seconds = PARTS[part](job)
    others = job.ranks[1:] or job.ranks
    messages = {rank: attrs.evolve(job.coordinator.messages[rank]) for rank in job.ranks}
    use = max((job.storages[rank].use for rank in others), key=lambda use: (use.requests, use.bytes))
    first = job.storages[0].use
    count = max(messages[rank].count for rank in others)
    size = max(messages[rank].bytes for rank in others)
    total = messages[0].count + count * (job.processes - 1)
    tracemalloc.start()
    try:
        PARTS[part](small)
        memory = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return Cost(
        part=part,
        processes=job.processes,
        use=use,
        messages=count,
        message_bytes=size,
        seconds=model.seconds(use, job.processes) + count * MESSAGE_SECONDS,
        first_use=first,
        job_messages=total,
        job_message_bytes=messages[0].bytes + size * (job.processes - 1),
        first_seconds=model.seconds(first, 1) + total * MESSAGE_SECONDS / SERVED,
        first_cpu_seconds=cpu_seconds,
        first_memory=memory,
    )


def _measure_launch(hosts: int) -> Cost:
    result = supervise_simulated(hosts)
    return Cost(
        part=LAUNCH,
        processes=hosts,
        use=Use(),
        messages=result.calls,
        message_bytes=result.job_bytes // hosts,
        seconds=0.0,
        first_use=Use(),
        job_messages=result.job_calls,
        job_message_bytes=result.job_bytes,
        first_seconds=max(seconds for event, seconds in result.decisions.items() if event != START),
        first_cpu_seconds=result.cpu_seconds,
        first_memory=supervise_simulated(hosts, memory=True).memory,
        decisions=result.decisions,
    )
