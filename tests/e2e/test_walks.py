"""Walks through the modules: of weights between files, layers and checkpoints, and of a config from the command line to a step."""

import re
import sys
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.run import open_weights
from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.import_export import export_run
from support import cli_runs
from support.paths import ROOT

FIXTURE = ROOT / "tests/plugins/models/huggingface/fixtures/llama3"
TOOLS = (
    "axlearn_core.config",
    "axlearn_core.contracts.arrays",
    "axlearn_core.contracts.experiment",
    "axlearn_core.errors",
    "axlearn_testing",
)
"""Modules that all others use: trees of nodes and the names of their parts, checks for arrays, and errors."""


class Walk:
    """The modules that something comes from or is handed to, in order.

    Threads that start meanwhile are walked through too.

    Args:
        carries: whether a value is what the walk follows.
        until: the module that the walk ends before.
        counts_all: counts it as another entry if a module that is under way is handed the value again.
    """

    def __init__(self, carries, until=None, counts_all=False):
        self.carries, self.until, self.under_way, self.entered = carries, until, Counter(), []
        self.counts_all = counts_all
        self.lock = threading.RLock()

    def __enter__(self):
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)
        return self.entered

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _observe(self, frame, event, value):
        with self.lock:
            self._record(frame, event, value)

    def _record(self, frame, event, value):
        module = frame.f_globals.get("__name__", "")
        if event not in ("call", "return") or not module.startswith("axlearn_") or module.startswith(TOOLS):
            return
        if frame.f_code.co_filename.startswith("<attrs"):  # the constructor of a node
            return
        if event == "return":
            self.under_way[module] -= 1
            if module not in self.entered and self.carries(value):
                self.entered.append(module)
            return
        code = frame.f_code
        if module == self.until:
            self.carries = lambda value: False
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_under_way = self.under_way[module] > 0 and not self.counts_all
        again = is_under_way or self.entered[-1:] == [module]  # one weight after the other
        if not again and any(self.carries(frame.f_locals.get(n)) for n in names):
            self.entered.append(module)
        self.under_way[module] += 1


def carries_array(value, depth=0):
    """Whether a value is an array, or holds one."""
    if isinstance(value, np.ndarray | jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.size > 8
    if depth < 2 and isinstance(value, dict | tuple | list):
        parts = value.values() if isinstance(value, dict) else value
        return any(carries_array(part, depth + 1) for part in parts)
    return False


def carries_config(value):
    return isinstance(value, Trainer.Config)


def documented(title):
    """The modules that docs/architecture.md lists for a walk."""
    section = (ROOT / "docs/architecture.md").read_text().partition(f"\n{title}:\n\n")[2].partition("\n\n")[0]
    return re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)


def assert_walk(entered, title):
    """Each module once, and those of the page."""
    assert len(entered) >= 4
    assert len(set(entered)) == len(entered), f"a module is entered again: {entered}"
    assert entered == documented(title)


def test_something_that_comes_back_is_seen():
    module = type(sys)("axlearn_walks")
    exec("def take(x):\n    return x\ndef call(f, x):\n    return f(x)", vars(module))
    other = type(sys)("axlearn_walks_too")
    exec("def take(x):\n    return x", vars(other))
    x = np.zeros(16)
    with Walk(carries_array) as entered:
        module.take(x), other.take(x), module.take(x)
    assert entered == ["axlearn_walks", "axlearn_walks_too", "axlearn_walks"]
    with Walk(carries_array) as entered:
        module.call(lambda x: module.take(other.take(x)), x)
    assert entered == ["axlearn_walks", "axlearn_walks_too"], "the first one is under way"
    with Walk(carries_array, counts_all=True) as entered:
        module.call(lambda x: module.take(other.take(x)), x)
    assert entered == ["axlearn_walks", "axlearn_walks_too", "axlearn_walks"]


def test_from_a_file_to_a_layer():
    weights = open_weights(FIXTURE)
    model = Functional.from_config(weights.config)
    with Walk(carries_array) as entered:
        model.bind(dict(weights.read()))
    assert_walk(entered, "A weight, from a Hugging Face file to a layer")


def test_from_a_state_to_a_checkpoint_and_back(tmp_path):
    state = {"params": {"weight": jnp.ones((37, 41))}, "step": jnp.zeros((), "int32")}
    checkpointer = ShardedCheckpointer.Config().build(directory=tmp_path)
    with Walk(carries_array) as entered:
        checkpointer.save(1, state)
        checkpointer.wait()
    assert_walk(entered, "A state, from the devices to a checkpoint")
    like = jax.eval_shape(lambda: state)
    with Walk(carries_array) as entered:
        checkpointer.restore(1, like)
    assert_walk(entered, "A state, from a checkpoint to the devices")
    checkpointer.close()


@pytest.mark.slow
def test_from_the_command_line_to_a_step_and_from_a_run_to_files(tmp_path):
    words = cli_runs.arguments(tmp_path / "run", steps=1, settings=("input.batch_size=8",))
    with Walk(carries_config, until="axlearn_core.compose.compiler", counts_all=True) as entered:
        result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert list(dict.fromkeys(entered)) == documented("A config, from the command line to the compiled step")
    again = [module for i, module in enumerate(entered) if module in entered[:i]]
    phase = ["axlearn_core.plugins.resolve", "axlearn_core.plugins.apply_settings"]
    assert again == [*phase * 3, "axlearn_core.train.trainer", "axlearn_core.compose.objective"]
    with Walk(carries_array) as entered:
        export_run(tmp_path / "run", tmp_path / "directory")
    assert_walk(entered, "A weight, from a checkpoint to a Hugging Face file")
