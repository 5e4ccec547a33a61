"""Kill and freeze random processes of a launched run. Check that it recovers and that its losses do not change.

    python benchmarks/random_faults.py --count 100 --folder DIR
    python benchmarks/random_faults.py --count 100 --folder DIR --seconds 330    # a part; the same command resumes

Trains a toy Llama on two processes under `axlearn launch --on local`. Each fault is `kill -9` or SIGSTOP of a random
process, including process 0, or `kill -9` of a host's agent and its child processes. A third of the faults hit
processes that are still starting, restoring or compiling. The run survives a fault if all processes of a later attempt
finish a step. If this takes more than `--limit` seconds, the fault is recorded in `DIR/faults.jsonl` with the last
output, the run is launched again, and the next fault follows. At the end, the losses are compared bit for bit with an
undisturbed run of the same number of steps.

Exit codes: 0 if every fault was survived and the losses are identical, 1 if not, 3 if `--seconds` passed before the
last fault.
"""

import argparse
import collections
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HOSTS = 2
SETTINGS = (
    "model.decoder.num_layers=2",
    "model.decoder.hidden_dim=32",
    "model.decoder.layer.attention.num_heads=2",
    "model.decoder.layer.feed_forward.hidden_dim=64",
    "learner.optimizer={type: adamw, learning_rate: 0.01}",
    "input.batch_size=4",
    "input.sequence_length=32",
    "evaluators={}",
    "trackers=[{type: jsonl}]",
    "checkpointer.every_steps=3",
    "log_every_steps=1",
)
OPTIONS = ("crash-loop=100000", "host-deaths=100000", "budget-infrastructure=100000", "freeze-seconds=1.5")
FAULTS = ("kill", "kill", "freeze", "freeze", "kill", "freeze", "kill", "freeze", "agent")


class NotSurvived(Exception):
    """The run did not recover."""


def environment():
    """Return an environment with one CPU device per process."""
    flags = "--xla_force_host_platform_device_count=1"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}


def read_records(file):
    """Return the objects of a JSONL file. Skip a partial last line of a killed process."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def train_words(run_dir, steps):
    """Return the arguments of `quickstart` at toy size."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["quickstart", "--run-dir", str(run_dir), "--steps", str(steps), *settings]


class Launch:
    """`axlearn launch` of the run, from its current state."""

    def __init__(self, folder):
        self.run_dir, self.errors = folder / "run", folder / "launch.txt"
        options = [word for option in OPTIONS for word in ("--option", option)]
        words = [*train_words(self.run_dir, 10_000_000), "--on", "local", "--hosts", str(HOSTS), "--spares", "1"]
        command = [sys.executable, "-m", "axlearn_core", "launch", *words, *options]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=errors)

    def events(self, *names):
        """Return the records of `processes.jsonl`."""
        return [r for r in read_records(self.run_dir / "processes.jsonl") if r["event"] in names]

    def wait_for(self, condition, seconds, description):
        """Wait until a condition is true and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            if self.process.poll() is not None:
                raise NotSurvived(f"the launcher exited with code {self.process.returncode}\n{self.text()}")
            time.sleep(0.05)
        raise NotSurvived(f"no {description} within {seconds:.0f} s\n{self.text()}")

    def started(self, after):
        """Return the newest attempt above a number whose processes have all started, and its processes by rank."""
        pids = collections.defaultdict(dict)
        for event in self.events("started"):
            pids[event["attempt"]][event["rank"]] = event["pid"]
        newest = max(pids, default=0)
        return (newest, pids[newest]) if newest > after and len(pids[newest]) == HOSTS else None

    def stepping(self, after):
        """Return the newest attempt above a number in which every process has finished a step, or None."""
        numbers = [e["attempt"] for e in self.events("stepping") if e["attempt"] > after]
        return max(numbers, default=None)

    def steps(self):
        """Return the number of metrics records so far."""
        return len(read_records(self.run_dir / "metrics.jsonl"))

    def stop(self, seconds=300):
        """Save and stop the run."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.abort()
            raise NotSurvived(f"it did not stop within {seconds:.0f} s of SIGTERM") from None
        if code != 128 + signal.SIGTERM:
            raise NotSurvived(f"exit code {code} after SIGTERM\n{self.text()}")

    def abort(self):
        """Stop the run immediately."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                time.sleep(0.2)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def text(self):
        """Return its last output and the events of its processes."""
        logs = sorted((self.run_dir / "launch/logs").glob("*.txt"))[-HOSTS:]
        return "\n".join([self.errors.read_text()[-3000:], *(f"{p.name}: {p.read_text()[-2000:]}" for p in logs)])


def parent(pid):
    """Return the parent of a process, such as the agent of a trainer."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class RandomFault:
    """The fault for a number.

    Attributes:
        early: Whether it hits the attempt after the last fault while that attempt starts, restores or compiles.
    """

    def __init__(self, seed, number):
        dice = random.Random(f"{seed} {number}")
        self.kind, self.rank, self.early = dice.choice(FAULTS), dice.randrange(HOSTS), dice.random() < 1 / 3
        self.seconds, self.steps = dice.random() * 4, dice.randrange(1, 8)


def inject(launch, plan, after, limit):
    """Inject one fault into an attempt above a number.

    Returns:
        Its record, with the attempt that it hit.
    """
    attempt, pids = launch.wait_for(lambda: launch.started(after), limit, "start of all processes")
    if plan.early:
        time.sleep(plan.seconds)
    else:
        launch.wait_for(lambda: launch.stepping(after), limit, "step of all processes")
        before = launch.steps()
        launch.wait_for(lambda: launch.steps() >= before + plan.steps, limit, f"{plan.steps} steps more")
        attempt, pids = launch.started(attempt - 1)
    stepping = launch.stepping(attempt - 1) is not None
    try:
        pid = parent(pids[plan.rank]) if plan.kind == "agent" else pids[plan.rank]
        os.kill(pid, signal.SIGSTOP if plan.kind == "freeze" else signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):  # the attempt is already over, so the fault hits the next one
        return inject(launch, plan, attempt, limit)
    return {"fault": plan.kind, "rank": plan.rank, "pid": pid, "attempt": attempt, "stepping": stepping}


def wait_until_survived(launch, record, limit):
    """Return the record with the seconds until a later attempt trains."""
    begin = time.monotonic()
    launch.wait_for(lambda: launch.stepping(record["attempt"]), limit, f"step after {record}")
    causes = [e for e in launch.events("exited", "frozen", "lost") if e["attempt"] == record["attempt"]]
    seconds = round(time.monotonic() - begin, 2)
    return record | {"survived": True, "seconds": seconds, "cause": causes[0]["reason"] if causes else ""}


def inject_all(folder, count, seconds, limit, seed):
    """Inject faults until there are `count` records or the time is over. Return the records.

    If an early fault follows, the run survives both when it recovers from the second one.
    """
    file, end = folder / "faults.jsonl", time.monotonic() + seconds
    launch, unproven = None, []
    try:
        while (number := len(read_records(file)) + len(unproven) + 1) <= count and time.monotonic() < end:
            if launch is None:
                launch = Launch(folder)
                after = max((e["attempt"] for e in launch.events("started")), default=0)
            try:
                plan = RandomFault(seed, number)
                unproven.append({"number": number, "load": os.getloadavg()[0]})
                unproven[-1] |= inject(launch, plan, after, limit)
                after = unproven[-1]["attempt"]
                if number < count and RandomFault(seed, number + 1).early:
                    continue
                last = wait_until_survived(launch, unproven[-1], limit)
                records = [*({**r, "survived": True, "seconds": None} for r in unproven[:-1]), last]
            except NotSurvived as error:
                records = [{**record, "survived": False, "error": str(error)} for record in unproven]
                launch.abort()
                launch = None
            unproven = []
            with file.open("a") as output:
                for record in records:
                    output.write(json.dumps(record) + "\n")
                    print(str(record)[:300], file=sys.stderr, flush=True)
        if launch is not None:
            launch.wait_for(lambda: launch.stepping(after), limit, "step before the end")
            launch.stop()
            launch = None
    finally:
        if launch is not None:
            launch.abort()
    return read_records(file)


def losses(run_dir):
    """Return the step and loss of each record, in file order."""
    return [(m["step"], m["loss"]) for m in read_records(run_dir / "metrics.jsonl") if "loss" in m]


def train_undisturbed(folder, steps):
    """Return the losses of two processes without a supervisor."""
    run_dir = folder / "undisturbed"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(HOSTS)}
    command = [sys.executable, "-m", "axlearn_core", "train", *train_words(run_dir, steps)]
    ranks = [
        subprocess.Popen(command, env=environment() | place | {"JAX_PROCESS_ID": str(rank)}, stdout=subprocess.DEVNULL)
        for rank in range(HOSTS)
    ]
    if any(rank.wait() for rank in ranks):
        raise SystemExit("the undisturbed run failed")
    return losses(run_dir)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Stop injecting faults after this time.")
    parser.add_argument("--limit", type=float, default=300.0, help="Seconds for the run to recover.")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    records = inject_all(folder, args.count, args.seconds, args.limit, args.seed)
    survived = [r for r in records if r["survived"]]
    print(f"survived: {len(survived)} of {len(records)}")
    if survived:
        for kind in sorted({r["fault"] for r in survived}):
            times = [r["seconds"] for r in survived if r["fault"] == kind and r["seconds"] is not None]
            line = f"median {statistics.median(times):.1f} s, at most {max(times):.1f} s" if times else "not timed"
            print(f"    {kind}: {sum(r['fault'] == kind for r in survived)}, {line}")
        print(f"    before the first step of an attempt: {sum(not r['stepping'] for r in survived)}")
    if len(records) < args.count:
        return 3
    disturbed = losses(folder / "run")
    undisturbed = train_undisturbed(folder, disturbed[-1][0])
    differences = sum(a != b for a, b in zip(disturbed, undisturbed, strict=False))
    same = disturbed == undisturbed
    print(f"losses: {len(disturbed)} and {len(undisturbed)}, {differences} differ; identical to the last bit: {same}")
    return 0 if same and len(survived) == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
