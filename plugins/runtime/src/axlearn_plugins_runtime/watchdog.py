"""The `watchdog` component: rules with actions, checked by a separate thread."""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax

from axlearn_core.config import Configurable, Node, node
from axlearn_plugins_runtime.actions import RestartProcess, stacks_path, timestamp
from axlearn_plugins_runtime.watchdog_rules import Hang, LossSpike, Rule, SlowSteps, StarvedInput


class RuleWatchdog(Configurable):
    """Checks rules from before the first compilation until the run ends, and runs the actions of broken rules.

    Incidents are logged to standard error and to `<run>/watchdog.jsonl`, one object per line. If native code holds the
    interpreter lock, this thread cannot run. A faulthandler timer then writes the stacks after twice the phase's limit, and ends
    the process if the rule's action is `restart-process`.
    """

    @node
    class Config(Configurable.Config["RuleWatchdog"]):
        """Rules of the watchdog.

        Attributes:
            rules: Rules by name. Incidents carry the name.
        """

        rules: Mapping[str, Node[Rule]] = {
            "hang": Hang.Config(),
            "loss_spike": LossSpike.Config(),
            "slow_steps": SlowSteps.Config(),
            "starved_input": StarvedInput.Config(),
        }

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.rules = {name: rule.build() for name, rule in cfg.rules.items()}
        self.run_dir, self.rank = Path(run_dir), jax.process_index()
        bounds = [rule.bound for rule in self.rules.values() if rule.bound is not None]
        self._interval = max(0.02, min([60.0, *(bound / 8 for bound in bounds)]))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._phase, self._step = "start", 0
        self._fault_handler = _FaultHandler(self.rules.values())

    def start(self) -> None:
        """See `axlearn_core.contracts.parts.Watchdog`."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, phase: str, step: int) -> None:
        """See `axlearn_core.contracts.parts.Watchdog`."""
        now = time.monotonic()
        with self._lock:
            self._phase, self._step = phase, step
            broken = {name: rule.begin(phase, step, now) for name, rule in self.rules.items()}
        self._act(broken)

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """See `axlearn_core.contracts.capabilities.ObservesSteps`."""
        with self._lock:
            broken = {name: rule.observe(step, values) for name, rule in self.rules.items()}
        self._act(broken)

    def close(self) -> None:
        """See `axlearn_core.contracts.parts.Watchdog`."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._fault_handler.close()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            with self._lock:
                self._fault_handler.arm(self._phase, self.run_dir, self.rank)
                broken = {name: rule.check(now) for name, rule in self.rules.items()}
            self._act(broken)

    def _act(self, broken: Mapping[str, str | None]) -> None:
        for name, message in broken.items():
            if message is None or self._closed.is_set():
                continue
            incident = {
                "time": timestamp(),
                "rule": name,
                "message": message,
                "phase": self._phase,
                "step": self._step,
                "rank": self.rank,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            }
            print(f"watchdog: {name}: {message}", file=sys.stderr, flush=True)
            self._attempt(lambda incident=incident: self._record(incident))
            for action in self.rules[name].actions:
                self._attempt(lambda action=action, incident=incident: action(incident, self.run_dir))

    def _record(self, incident: Mapping[str, Any]) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / "watchdog.jsonl").open("a") as file:
            file.write(json.dumps(incident) + "\n")

    @staticmethod
    def _attempt(act: Any) -> None:
        """Run an action and print its error. An error, such as a full disk, must not end the watchdog."""
        try:
            act()
        except Exception as error:
            print(f"watchdog: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _FaultHandler:
    """The faulthandler timer, which works without the interpreter lock. A process has only one."""

    def __init__(self, rules: Any):
        self.hangs = [rule for rule in rules if isinstance(rule, Hang)]
        self.ends = any(isinstance(a, RestartProcess) for rule in self.hangs for a in rule.actions)
        self.file: IO[str] | None = None

    def arm(self, phase: str, run_dir: Path, rank: int) -> None:
        """Restart the timer."""
        if not self.hangs:
            return
        if self.file is None:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                self.file = stacks_path(run_dir, rank).open("a")
            except OSError:
                return
        seconds = 2 * min(rule.limit(phase) for rule in self.hangs)
        faulthandler.dump_traceback_later(seconds, file=self.file, exit=self.ends)

    def close(self) -> None:
        """Cancel the timer, and remove the file if it is empty."""
        if self.file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        path = Path(self.file.name)
        self.file.close()
        self.file = None
        if path.exists() and not path.stat().st_size:
            path.unlink()
