"""Kill runs of twelve shapes with SIGKILL at seeded moments, and compare what they resume with.

    PYTHONPATH=tests uv run --all-packages python -m support.random_kills --kills 20 --record kills.jsonl

kills each shape 20 times, 240 times in all. It continues after a kill that left a trace, prints a table, and exits with 1 if
there was a trace.
"""

import argparse
import collections
import ctypes
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

from axlearn_plugins_runtime.job.progress import Progress
from support import cli_runs

MOMENTS = ("compile", "start", "step", "save", "read", "restore", "save", "step", "compile", "read")
"""In turn: while the first step compiles, while it imports, after a step, during a save, while it reads the checkpoint's
arrays, while it builds and restores."""
SECONDS = {"start": 4.0, "compile": 3.0, "restore": 1.2, "save": 0.03, "read": 0.003, "step": 0.02}
"""Moment -> the longest time from its beginning to the kill."""
PEER_SECONDS = 90.0
"""For the processes that were not killed to end."""
IN_OPEN, IN_CREATE, IN_MOVED_TO = 0x20, 0x100, 0x80


@attrs.frozen
class Shape:
    """A kind of run: how it starts, when to kill it, and what has to be equal after a kill.

    `seconds` has, for each moment, the longest time from its beginning to the kill.
    """

    name: str
    options: tuple = ()
    steps: int = 80
    processes: int = 1
    checkpointer: tuple = ("checkpointer.every_steps=2",)
    moments: tuple = MOMENTS
    seconds: dict = SECONDS

    def command(self, run):
        """Arguments of Python."""
        settings = (*self.checkpointer, "trackers=[{type: jsonl}]")
        return ("-m", "axlearn_core", *cli_runs.arguments(run, steps=self.steps, settings=settings, more=self.options))

    def trace(self, run, whole):
        """What differs from the run that was never killed, as far as this one is; empty: nothing."""
        rows, expected = [(m["step"], m["loss"]) for m in cli_runs.metrics(run) if "loss" in m], cli_runs.losses(whole)
        if rows != expected[: len(rows)]:
            return f"losses differ: {next(pair for pair in zip(rows, expected, strict=False) if pair[0] != pair[1])}"
        return ""

    def is_passed(self, moment, run, job):
        """Whether one of the moments of this kind of run only has come."""
        raise KeyError(moment)


JOIN = ("--set", "distributed.heartbeat_seconds=20", "--set", "distributed.join_seconds=60")
ORBAX = {
    "checkpointer": ("checkpointer={type: orbax, every_steps: 2}",),
    "seconds": SECONDS | {"save": 0.3, "read": 0.03},
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("plain"),
        Shape("workers", ("--set", "input.workers=2")),
        Shape("accumulation", ("--with", "gradient-accumulation:steps=2")),
        Shape("two-devices", ("--target", "cpu-2")),
        Shape("two-processes", JOIN, processes=2),
        Shape("every-step", checkpointer=("checkpointer.every_steps=1",)),
        Shape("ema", ("--with", "ema")),
        Shape("dropout", ("--with", "dropout:rate=0.1")),
        Shape("moe", ("--with", "moe:num_experts=4")),
        Shape("first-fit", ("--set", "input.packing=first-fit")),
        Shape("orbax", **ORBAX),
        Shape("orbax-two-processes", JOIN, processes=2, **ORBAX),
    )
}


class FileEvents:
    """Says when files of folders are opened or created, within a millisecond (inotify)."""

    def __init__(self, folders, mask):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder in folders:
            if self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), mask) < 0:
                raise OSError(ctypes.get_errno(), f"inotify_add_watch {folder}")

    def names(self):
        """Of the files since the last call."""
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return []
        names, at = [], 0
        while at < len(data):
            length = struct.unpack_from("iIII", data, at)[3]
            names.append(data[at + 16 : at + 16 + length].rstrip(b"\0").decode())
            at += 16 + length
        return names

    def close(self):
        os.close(self._descriptor)


@attrs.frozen
class Job:
    """The processes of one attempt."""

    processes: list
    progress: list  # of each process: the file with its phase
    begin: float

    @classmethod
    def start(cls, shape, run, folder, *, cached=True):
        """`cached`: with JAX's cache of compiled programs, which all attempts share."""
        count, command = shape.processes, [sys.executable, *map(str, shape.command(run))]
        environment = cli_runs.environment() | {"PYTHONDONTWRITEBYTECODE": ""}
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": str(cached).lower()}
        if count > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
        files = [folder / f"progress-{rank}" for rank in range(count)]
        for file in files:
            file.unlink(missing_ok=True)
        processes = []
        for rank in range(count):
            own = {"JAX_PROCESS_ID": str(rank), "AXLEARN_PROGRESS": str(files[rank])}
            with (folder / f"stderr-{rank}").open("wb") as stderr:  # the process has its own handle of it
                processes.append(
                    subprocess.Popen(command, env=environment | own, stdout=subprocess.DEVNULL, stderr=stderr)
                )
        return cls(processes, files, time.monotonic())

    def phase(self, rank=0):
        """What a process does; `start` before it says so."""
        progress = Progress.read(self.progress[rank])
        return progress[2] if progress else "start"

    def over(self):
        return any(process.poll() is not None for process in self.processes)

    def kill(self, ranks):
        """Returns the phase at death, and processes of the job that outlive it for more than `PEER_SECONDS`."""
        children = [pid for process in self.processes for pid in descendants(process.pid)]
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGKILL)
        phase, end = self.phase(ranks[0]), time.monotonic() + PEER_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                children.append(-process.pid)
        while (left := [pid for pid in children if pid < 0 or alive(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        return phase, left


def descendants(pid):
    """Process ids below one, all the way down."""
    below = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return [*below, *itertools.chain.from_iterable(map(descendants, below))]


def alive(pid):
    """Whether a process runs (and is not a zombie that nobody waited for)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def checkpoints(run):
    """Steps of the committed checkpoints."""
    return sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit())


def partial_saves(run):
    """Of saves that did not come to their end: name and time."""
    return {(p.name, p.stat().st_mtime_ns) for p in (run / "checkpoints").glob(".*.partial")}


def digest(run):
    """Hash of the newest checkpoint's arrays, byte for byte."""
    result = hashlib.sha256()
    for path, (dtype, data) in cli_runs.stored_state(run).items():
        result.update(f"{path} {dtype}\0".encode() + data)
    return result.hexdigest()


def wait_for(moment, job, run, draw, shape):
    """Returns at the moment, or with False where the job ended before it."""
    steps, events, end = len(cli_runs.logged(run)), None, time.monotonic() + 300
    goal = steps + draw.randint(2, max(3, shape.steps // 7))
    delay = shape.seconds[moment] * draw.random()
    if moment == "read":
        newest = run / "checkpoints" / str(checkpoints(run)[-1]) / "state"
        events = FileEvents([newest / "weights", newest / "others"], IN_OPEN)
    elif moment == "save":
        events = FileEvents([run / "checkpoints"], IN_CREATE | IN_MOVED_TO)
    passed = False
    try:
        while not passed:
            if job.over() or time.monotonic() > end:
                return False
            if moment in ("compile", "restore"):
                passed = job.phase() == moment
            elif moment == "step":
                passed = len(cli_runs.logged(run)) >= goal
            elif moment == "start":
                passed = True
            elif events:
                passed = any(n.endswith((".bin", ".partial", "manifest.ocdbt")) for n in events.names())
            else:
                passed = len(cli_runs.logged(run)) >= goal - 2 and shape.is_passed(moment, run, job)
            time.sleep(0 if events else 0.002)
        time.sleep(delay)
        return not job.over()
    finally:
        if events:
            events.close()


def finish(shape, run, whole, folder):
    """Lets a run come to its end; returns what differs."""
    job = Job.start(shape, run, folder)
    codes = [process.wait(1800) for process in job.processes]
    if any(codes):
        return f"exit codes {codes}: {(folder / 'stderr-0').read_text()[-1500:]}"
    if len(cli_runs.losses(run)) != shape.steps:
        return f"{len(cli_runs.losses(run))} steps, not {shape.steps}"
    return shape.trace(run, whole) or ("" if digest(run) == digest(whole) else "the last checkpoint differs")


def kill_many(shape, kills, folder):
    """Kills runs of a shape so many times, each resumed by the next attempt; yields a row for each kill.

    A run that a kill left a trace in is given up, and another begun. The row has the moment aimed at, the phase at death,
    whether a save was cut in two, and what differs after it (`Shape.trace`). Raises `AssertionError` where a run that came to
    its end differs, or where one that is never killed fails.
    """
    draw, whole, runs = random.Random(shape.name), folder / "whole", itertools.count()
    if problem := finish(shape, whole, whole, folder):
        raise AssertionError(f"{shape.name} without a kill: {problem}")
    run = folder / f"run-{next(runs)}"
    count = attempts = 0
    while count < kills and attempts < 3 * kills:
        attempts += 1
        moment = shape.moments[count % len(shape.moments)]
        if not checkpoints(run) and moment in ("read", "save"):
            moment = "step"
        if moment == "compile":
            shutil.rmtree(run / "compiled", ignore_errors=True)
        before = partial_saves(run)
        job = Job.start(shape, run, folder, cached=moment != "compile")
        landed = wait_for(moment, job, run, draw, shape)
        ranks = range(len(job.processes))
        phase, left = job.kill(draw.choice([[0], [ranks[-1]], list(ranks)]))
        problem = shape.trace(run, whole)
        if not landed and any(process.returncode not in (0, -9) for process in job.processes):
            problem = f"ended by itself with {[p.returncode for p in job.processes]}: {(folder / 'stderr-0').read_text()[-1500:]}"
        elif not landed:  # came to its end before the moment
            problem = problem or finish(shape, run, whole, folder)
            if not problem:
                run = folder / f"run-{next(runs)}"
                continue
        if left:
            problem = problem or f"processes outlived it: {left}"
        torn = bool(partial_saves(run) - before)
        count += 1
        row = {"shape": shape.name, "kill": count, "moment": moment, "phase": phase, "torn": torn}
        row |= {"steps": len(cli_runs.logged(run)), "seconds": round(time.monotonic() - job.begin, 1), "trace": problem}
        yield row
        if problem:
            run = folder / f"run-{next(runs)}"
    if problem := finish(shape, run, whole, folder):
        raise AssertionError(f"{shape.name} after {count} kills: {problem}")


def main(shapes=SHAPES, description=__doc__, kills=20):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=kills, help="of each shape")
    parser.add_argument("--shapes", nargs="*", default=list(shapes))
    parser.add_argument("--record", type=Path, help="a file of JSON lines, one for each kill")
    options = parser.parse_args()
    total = collections.Counter()

    def record(row):
        print(row, flush=True)
        if options.record:
            with options.record.open("a") as file:
                file.write(json.dumps(row) + "\n")

    print(
        "| shape | kills | imports | restores | compiles | runs | saves cut | traces |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    lines = []
    with tempfile.TemporaryDirectory(prefix="axlearn-kills-") as root:
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": f"{root}/cache", "JAX_PLATFORMS": "cpu"}
        os.environ |= {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        os.environ.setdefault("XLA_FLAGS_OF_ONE_DEVICE", "")
        for shape in (shapes[name] for name in options.shapes):
            folder = Path(root) / shape.name
            folder.mkdir()
            rows = []
            try:
                for row in kill_many(shape, options.kills, folder):
                    record(row)
                    rows.append(row)
            except Exception as error:  # the other shapes go on
                record({"shape": shape.name, "trace": f"given up: {error!r}"})
                total["given up"] += 1
            total.update(kills=len(rows), traces=sum(bool(r["trace"]) for r in rows))
            phases = collections.Counter(r["phase"] for r in rows)
            others = len(rows) - sum(phases[p] for p in ("start", "restore", "compile"))
            torn, traces = sum(r["torn"] for r in rows), sum(bool(r["trace"]) for r in rows)
            counts = (len(rows), phases["start"], phases["restore"], phases["compile"], others, torn, traces)
            lines.append(f"| {shape.name} | " + " | ".join(map(str, counts)) + " |")
            print(lines[-1], flush=True)
            shutil.rmtree(folder)
    summary = f"{total['kills']} kills, {total['traces']} left a trace, {total['given up']} shapes given up"
    print("\n".join(["", *lines, summary]))
    sys.exit(bool(total["traces"] or total["given up"]))


if __name__ == "__main__":
    main()
