"""The `watchdog` feature."""

from typing import Any, Literal, TypeVar

from axlearn_core.config import Node, node, patch, setting
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_runtime.actions import DumpStacks, RestartProcess, StopRun
from axlearn_plugins_runtime.watchdog import RuleWatchdog
from axlearn_plugins_runtime.watchdog_rules import Hang

Tree = TypeVar("Tree", bound=Node[Any])

ON_HANG = {
    "report": (),
    "stacks": (DumpStacks.Config(),),
    "stop": (DumpStacks.Config(), StopRun.Config()),
    "restart": (DumpStacks.Config(), RestartProcess.Config()),
}


@node
class WatchdogFeature(Feature):
    """Detects hangs, slow steps, starved input and loss spikes, and reports them in `<run>/watchdog.jsonl`.

    `hang_seconds` is the minimum time limit for a phase, and `save_seconds` is the minimum time limit for a save. Restoring and
    compiling may take an hour. `on_hang` sets the actions: `report` only logs the hang, `stacks` also writes the stacks of all
    threads, `stop` also saves and stops, and `restart` writes the stacks and exits with code 75 for a supervisor. To use custom
    rules and actions, set `watchdog.rules` in a run file. The feature replaces an experiment's own watchdog.
    """

    stage = "execute"
    replaces = ("watchdog",)

    hang_seconds: float = setting(default=600.0, gt=0)
    save_seconds: float = setting(default=2400.0, gt=0)
    on_hang: Literal["report", "stacks", "stop", "restart"] = "stacks"

    def apply(self, cfg: Tree) -> Tree:
        """Set the watchdog."""
        watchdog = RuleWatchdog.Config()
        hang = Hang.Config(seconds=self.hang_seconds, save_seconds=self.save_seconds, actions=ON_HANG[self.on_hang])
        return patch(cfg, {"watchdog": RuleWatchdog.Config(rules={**watchdog.rules, "hang": hang})})
