"""A run under `axlearn launch` on this machine, and signals to its processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import cli_runs

ONE_DEVICE = "--xla_force_host_platform_device_count=1"


class LaunchedRun:
    """`axlearn launch quickstart` at toy size, in the background. Ends all of it at the end of a `with`."""

    def __init__(self, run_dir, *, hosts, spares=0, steps=300, on=("local",), options=(), settings=(), more=()):
        self.run_dir = Path(run_dir)
        words = cli_runs.arguments(self.run_dir, steps=steps, settings=settings)[1:]
        option_values = {"crash-loop": "99", "host-deaths": "99", **dict(o.split("=") for o in options)}
        option_words = [word for name, value in option_values.items() for word in ("--option", f"{name}={value}")]
        size = ["--hosts", str(hosts), "--spares", str(spares)]
        self.errors = self.run_dir.with_suffix(".err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "axlearn_core", "launch", *words, "--on", *on, *size, *option_words, *more],
                env=cli_runs.environment() | {"XLA_FLAGS": ONE_DEVICE},  # as `together`
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)  # at once
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def events(self, *names):
        file = self.run_dir / "processes.jsonl"
        records = [json.loads(line) for line in cli_runs.read_lines(file)]
        return [r for r in records if not names or r["event"] in names]

    def wait_until(self, condition, seconds=300):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if actual := condition():
                return actual
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)
        raise AssertionError(f"it did not come to that in {seconds} s\n{self.text()}")

    def attempt(self, number, steps=2):
        """Waits until an attempt trains and has logged a few steps; returns rank -> process id."""
        self.wait_until(lambda: [e for e in self.events("stepping") if e["attempt"] == number])
        before = len(cli_runs.metrics(self.run_dir))
        self.wait_until(lambda: len(cli_runs.metrics(self.run_dir)) >= before + steps)
        return {e["rank"]: e["pid"] for e in self.events("started") if e["attempt"] == number}

    def finish(self, code=0, seconds=400):
        assert self.process.wait(seconds) == code, self.text()

    def text(self):
        logs = sorted((self.run_dir / "launch/logs").glob("*.txt"))[-2:]
        return "\n".join([self.errors.read_text()[-4000:], *(f"{p.name}: {p.read_text()[-1500:]}" for p in logs)])


def parent(pid):
    """The process that started another one: the agent of a trainer."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
