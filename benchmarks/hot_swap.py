"""Downtime after a process is killed: `axlearn launch` under Ray compared with a loop that restarts everything.

    python benchmarks/hot_swap.py --repeats 20
    python benchmarks/hot_swap.py --repeats 3 --hosts 2 --only ours

Both train a Llama of the quickstart's size on one process per host, save every 5 steps, and lose one random process at
a time to `kill -9`, including process 0. The downtime lasts from the kill until every process has finished a step
again. Blocks of kills alternate between the two, because other work shares the machine. There are `--rest` seconds
between two kills, so that the warm processes of the next swap can import their modules. Hardware failures are further
apart.

The two do not only differ in the processes that they replace. Ours loads a compiled step from the run directory, and
the baseline compiles. With `--both-compile`, ours stores no compiled step and both use JAX's compilation cache, so the
ratio only compares the restarts.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

BASELINE = Path(__file__).parent / "baselines" / "restart_all.py"
SETTINGS = (
    "input.sequence_length=64",
    "checkpointer.every_steps=5",
    "log_every_steps=1",
    "evaluators={}",
    "trackers=[{type: jsonl}]",
    "learner.optimizer={type: adamw, learning_rate: 0.0003}",
)


def environment(cache=None):
    """Return the environment of the trainers.

    Args:
        cache: Directory of JAX's compilation cache.
    """
    flags = "--xla_force_host_platform_device_count=1"
    return (
        os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}
        | (
            {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            if cache
            else {}
        )
    )


def wait_for(condition, process, seconds=600):
    end = time.time() + seconds
    while time.time() < end:
        if value := condition():
            return value
        if process.poll() is not None:
            raise SystemExit(f"it exited with {process.returncode}")
        time.sleep(0.02)
    raise SystemExit(f"no progress for {seconds} s")


def lines(file):
    return file.read_text().splitlines() if file.exists() else []


def objects(file):
    items = []
    for line in lines(file):
        try:
            items.append(json.loads(line))
        except ValueError:
            break
    return items


def seconds_of(text):
    return datetime.fromisoformat(text).timestamp()


class Ours:
    """`axlearn launch` with one spare."""

    name = "axlearn launch --on local"

    def __init__(self, folder, hosts, both_compile):
        self.run, self.hosts, self.attempt = folder / "ours", hosts, 0
        settings = (*SETTINGS, "keep_compiled_step=false") if both_compile else SETTINGS
        words = [w for s in settings for w in ("--set", s)]
        options = [w for o in ("crash-loop=100000", "host-deaths=100000") for w in ("--option", o)]
        size = ["--hosts", str(hosts), "--spares", "1", "--steps", "10000000", "--run-dir", str(self.run)]
        command = [
            sys.executable,
            "-m",
            "axlearn_core",
            "launch",
            "quickstart",
            "--on",
            "local",
            *size,
            *words,
            *options,
        ]
        self.log = (folder / "ours.log").open("a")
        self.process = subprocess.Popen(command, env=environment(), stdout=self.log, stderr=self.log)
        try:
            self.begin()
        except BaseException:
            self.close()
            raise

    def events(self, event, attempt):
        return [e for e in objects(self.run / "processes.jsonl") if (e["event"], e["attempt"]) == (event, attempt)]

    def begin(self):
        """Wait until the next attempt trains, and return the time."""
        self.attempt += 1
        (event,) = wait_for(lambda: self.events("stepping", self.attempt), self.process)
        return seconds_of(event["time"])

    def swap(self, rank):
        (pid,) = [e["pid"] for e in self.events("started", self.attempt) if e["rank"] == rank]
        reached = objects(self.run / "metrics.jsonl")[-1]["step"]
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        stepping = self.begin()
        death = seconds_of(self.events("exited", self.attempt - 1)[0]["time"])
        started = max(seconds_of(e["time"]) for e in self.events("started", self.attempt))
        time.sleep(6)  # until the phase clock has written its records
        record = objects(self.run / "phases.jsonl")[-1]
        spent, begin = record["seconds"], seconds_of(record["attempt"])
        phases = {
            "seen": death - killed,
            "others ended, ranks given": started - death,
            "joined, config resolved": begin - started,
            "model and input built": spent["start"],
            "restored": spent["restore"],
            "compiled or loaded": spent["compile"],
        }
        phases["first step"] = stepping - killed - sum(phases.values())
        begun = int(self.events("stepping", self.attempt)[0]["reason"].rpartition(" ")[2])
        return {"total": stepping - killed, "phases": phases, "lost_steps": reached - begun, "rank": rank}

    def close(self):
        self.process.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)


class Baseline:
    """`baselines/restart_all.py`."""

    name = "restart_all.py"

    def __init__(self, folder, hosts, both_compile):
        self.run, self.hosts = folder / "baseline", hosts
        cache = folder / "cache" if both_compile else None
        command = [
            sys.executable,
            str(BASELINE),
            "--processes",
            str(hosts),
            "--steps",
            "10000000",
            "--dir",
            str(self.run),
        ]
        self.log = (folder / "baseline.log").open("a")
        self.process = subprocess.Popen(
            command, env=environment(cache), stdout=self.log, stderr=self.log, start_new_session=True
        )
        try:
            self.begin(0.0)
        except BaseException:
            self.close()
            raise

    def steps(self, rank):
        rows = [line.split() for line in lines(self.run / f"steps-{rank}")]
        return [(float(f[0]), int(f[1])) for f in rows if len(f) == 2]

    def begin(self, since):
        """Wait until every process has finished a step after `since`. Return the time and the step of the last process."""

        def stepped():
            first = [next((s for s in self.steps(rank) if s[0] > since), None) for rank in range(self.hosts)]
            return None if None in first else max(first)

        return wait_for(stepped, self.process)

    def swap(self, rank):
        pids = [line for line in lines(self.run / "events") if "started" in line][-1].split()[2:]
        reached = self.steps(0)[-1][1]
        killed = time.time()
        os.kill(int(pids[rank]), signal.SIGKILL)
        dead = wait_for(
            lambda: [x for x in lines(self.run / "events") if "dead" in x and float(x.split()[0]) > killed],
            self.process,
        )
        dead = float(dead[0].split()[0])
        started = wait_for(
            lambda: [x for x in lines(self.run / "events") if "started" in x and float(x.split()[0]) > killed],
            self.process,
        )
        started = float(started[0].split()[0])
        stepping, step = self.begin(started)
        phases = {
            "seen": dead - killed,
            "others ended, all started": started - dead,
            "until the first step": stepping - started,
        }
        return {"total": stepping - killed, "phases": phases, "lost_steps": reached - step + 1, "rank": rank}

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def block(make, folder, hosts, both_compile, ranks, rest):
    subject = make(folder, hosts, both_compile)
    try:
        blocks = []
        for rank in ranks:
            time.sleep(rest)
            load = os.getloadavg()[0]
            blocks.append(subject.swap(rank) | {"load": load})
            print(f"{subject.name}: {json.dumps(blocks[-1])}", file=sys.stderr, flush=True)
        return blocks
    finally:
        subject.close()


def show(name, results):
    totals, lost = [f["total"] for f in results], [f["lost_steps"] for f in results]
    print(
        f"\n{name}: median {statistics.median(totals):.2f} s of {len(totals)}, {min(totals):.2f} to {max(totals):.2f}; "
        f"steps lost: median {statistics.median(lost):.0f}, at most {max(lost)}"
    )
    for phase in results[0]["phases"]:
        print(f"    {statistics.median(f['phases'][phase] for f in results):6.2f} s  {phase}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--block", type=int, default=5, help="Number of kills per block.")
    parser.add_argument("--rest", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--both-compile", action="store_true", help="Use a compilation cache for both and no stored step."
    )
    parser.add_argument("--only", choices=["ours", "baseline"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    classes = {"ours": Ours, "baseline": Baseline}
    if arguments.only:
        classes = {arguments.only: classes[arguments.only]}
    random_ranks = random.Random(arguments.seed)
    ranks = [random_ranks.randrange(arguments.hosts) for _ in range(arguments.repeats)]
    results = {name: [] for name in classes}
    for begin in range(0, arguments.repeats, arguments.block):
        for name, make in classes.items():
            with tempfile.TemporaryDirectory(prefix="hot-swap-") as folder:
                part = ranks[begin : begin + arguments.block]
                results[name] += block(
                    make, Path(folder), arguments.hosts, arguments.both_compile, part, arguments.rest
                )
    for name, make in classes.items():
        show(make.name, results[name])
    if len(results) == 2:
        ratio = statistics.median(f["total"] for f in results["ours"]) / statistics.median(
            f["total"] for f in results["baseline"]
        )
        how = (
            "both compile, with a cache" if arguments.both_compile else "ours loads a kept step, the baseline compiles"
        )
        print(f"\nours / baseline: {ratio:.2f} ({how})")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
