"""Check that the watchdog ignores slow steps and detects hangs in time. All waiting is in real time.

    python benchmarks/watchdog.py --minutes 30

Runs a toy model with sleeping steps, like a host that waits for devices. All rules of the watchdog are on, and only the
limits of `hang` are set. Of each 50 steps, four are slow (30% to 80% of the limit, never three in a row) and one batch
is slow, as are every second save and evaluation. Any report of the watchdog is a false alarm. At the end, the run hangs
in a step. Then shorter runs hang in each phase, `--repeats` times. A hang is detected in time if it is reported within
twice the limit of the phase.
"""

import argparse
import collections
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.config import Configurable, node
from axlearn_core.train.loop import TrainLoop
from axlearn_plugins_runtime.actions import DumpStacks, RestartProcess
from axlearn_plugins_runtime.watchdog import RuleWatchdog
from axlearn_plugins_runtime.watchdog_rules import Hang
from axlearn_testing.train import Noise, Numbers, TrainerSuite

PHASES = ("input", "step", "save", "evaluate")
BLOCK = 50
STEP_SECONDS = 0.1


class Schedule:
    """Duration of each phase, and the phase that hangs.

    Args:
        bound: Time limit of a step in seconds. The limit of a save is twice as long.
        seconds: Time after which the next phase of the kind `hang` does not end.
        hang: Kind of phase that hangs.
    """

    def __init__(self, bound, seconds, hang, seed):
        self.bounds = {phase: bound * (2 if phase == "save" else 1) for phase in PHASES}
        self.hang, self.end = hang, time.monotonic() + seconds
        self.dice = random.Random(seed)
        self.calls = collections.Counter()
        self.slow = collections.defaultdict(list)
        self.slow_steps = set()

    def wait(self, phase):
        """Sleep for the duration of the phase."""
        number = self.calls[phase]
        self.calls[phase] += 1
        if number % BLOCK == 0 and phase == "step":
            first = self.dice.randrange(15, 30)
            self.slow_steps = {number + n for n in (first, first + 1, self.dice.randrange(35, 40), 45)}
        if phase == self.hang and time.monotonic() > self.end:
            self.report()
            time.sleep(1e6)
        share = self.dice.uniform(0.3, 0.8)
        slow = {"step": number in self.slow_steps, "input": number % BLOCK == 10}
        if number and slow.get(phase, number % 2 == 1):
            self.slow[phase].append(share)
            time.sleep(share * self.bounds[phase])
        elif phase == "step":
            time.sleep(STEP_SECONDS)

    def report(self):
        """Print one line before the hang."""
        slow = {phase: {"count": len(shares), "longest_share": max(shares)} for phase, shares in self.slow.items()}
        print(json.dumps({"phases": self.calls, "slow": slow, "hang_began": time.time()}), flush=True)


schedule = Schedule(1.0, 0.0, "", 0)


class SleepingSteps(Configurable):
    """Sleeps before every step."""

    @node
    class Config(Configurable.Config["SleepingSteps"]):
        """Settings of `SleepingSteps`. There are none."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def due(self, step):
        return True

    def take_step(self, session, batch):
        schedule.wait("step")
        return session.program.train_step(session.state, batch)


class SlowNumbers(Numbers):
    """Batches, some of which are late."""

    def __next__(self):
        schedule.wait("input" if self.count is None else "evaluate")
        return super().__next__()


class SlowNoise(Noise):
    """The input of `SlowNumbers`."""

    @node
    class Config(Noise.Config):
        """Settings of `SlowNoise`, as for its base."""

    def train(self):
        return SlowNumbers()

    def evaluation(self):
        return SlowNumbers(1)


class SlowCheckpointer(ShardedCheckpointer):
    """Checkpointer with some slow saves."""

    @node
    class Config(ShardedCheckpointer.Config):
        """Settings of `SlowCheckpointer`, as for its base."""

    def save(self, step, state, **values):
        schedule.wait("save")
        return super().save(step, state, **values)


def train(folder, bound, seconds, hang, seed):
    """Run until the hang. The watchdog ends the process."""
    global schedule
    schedule = Schedule(bound, seconds, hang, seed)
    actions = (DumpStacks.Config(), RestartProcess.Config())
    rule = Hang.Config(seconds=bound, save_seconds=2 * bound, start_seconds=600.0, actions=actions)
    suite = TrainerSuite()
    suite.config = TrainLoop.Config(check=SleepingSteps.Config())
    suite.run(
        folder,
        input=SlowNoise.Config(),
        checkpointer=SlowCheckpointer.Config(),
        checkpointer__every_steps=25,
        evaluators__eval__every_steps=40,
        trackers=(),
        max_steps=10**9,
        watchdog=RuleWatchdog.Config(rules={**RuleWatchdog.Config().rules, "hang": rule}),
    )


def measure(folder, bound, seconds, hang, seed):
    """Return the phases of one run and the reports of the watchdog."""
    words = [
        "--run",
        str(folder),
        "--bound",
        str(bound),
        "--seconds",
        str(seconds),
        "--hang",
        hang,
        "--seed",
        str(seed),
    ]
    process = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    ended = time.time()
    report = json.loads(process.stdout.splitlines()[-1])
    incidents = [json.loads(line) for line in (folder / "watchdog.jsonl").read_text().splitlines()]
    *false_alarms, last = incidents
    limit = bound * (2 if hang == "save" else 1)
    waited = ended - report.pop("hang_began")
    in_time = process.returncode == 75 and (last["rule"], last["phase"]) == ("hang", hang) and waited <= 2 * limit
    return {
        "hang": hang, "bound": limit, "ended_after": waited, "in_time": in_time,
        "false_alarms": [i["message"] for i in false_alarms], "message": last["message"], **report,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--bound", type=float, default=20.0, help="Time limit of a step of the long run, in seconds.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--hang", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        train(args.run, args.bound, args.seconds, args.hang, args.seed)
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="watchdog-") as folder:
        plans = [(args.bound, 60 * args.minutes, "step", args.seed)]
        plans += [(4.0, 30.0, hang, seed) for hang in PHASES for seed in range(args.repeats)]
        for number, plan in enumerate(plans):
            results.append(measure(Path(folder) / str(number), *plan))
            print(json.dumps(results[-1] | {"load": os.getloadavg()[0]}), flush=True)
    long, *short = results
    print(f"\n{args.minutes:g} minutes, bound {args.bound:g} s: {long['phases']['step']} steps, {long['slow']}")
    print(f"false alarms: {len(long['false_alarms'])}; the hang at the end was ended after {long['ended_after']:.1f} s")
    for phase in PHASES:
        waits = [r["ended_after"] for r in short if r["hang"] == phase]
        if waits:
            bound = next(r["bound"] for r in short if r["hang"] == phase)
            times = f"median {statistics.median(waits):.1f} s, at most {max(waits):.1f} s"
            print(f"hang in {phase}: bound {bound:g} s, {len(waits)} ended, {times}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(r["in_time"] and not r["false_alarms"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
