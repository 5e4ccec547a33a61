"""Parts that do not fit: one clear error, exit code 2, and no run directory."""

import re
import sys

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from support import cli_runs

PARTS = '''
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Configurable


class Counter(nnx.Module):
    """A learner that is a module with variables."""

    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))


class Unseeded(nnx.Module):
    """[B, S, D] -> [B, S, D], with dropout that was given no stream."""

    def __init__(self, input_dim: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(input_dim))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(x)


class Greedy(Configurable):
    """An input that asks for a width."""

    def __init__(self, cfg, *, seed, width):
        self.width = width
'''
RULE = """
import os

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_mesh_rules():
    if "WITH_BAD_RULE" not in os.environ:
        return []
    return [MeshRule(target="cpu-*", features=("warp",), packages={"warp": "axlearn-plugins-loom"})]
"""


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """A distribution with these parts."""
    info = tmp_path / "site/bad_parts-1.0.dist-info"
    info.mkdir(parents=True)
    text = "Metadata-Version: 2.1\nName: bad-parts\nVersion: 1.0\nRequires-Dist: axlearn-core>=0.1\n"
    (info / "METADATA").write_text(text)
    names = {"bad-counter": "Counter", "bad-unseeded": "Unseeded", "bad-greedy": "Greedy"}
    points = "".join(f"{name} = bad_parts:{cls}\n" for name, cls in names.items())
    (info / "entry_points.txt").write_text(f"[axlearn.components]\n{points}[axlearn.plugins]\nbad-rule = bad_rule\n")
    (tmp_path / "site/bad_parts.py").write_text(PARTS)
    (tmp_path / "site/bad_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(str(info.parent))
    yield
    for module in ("bad_parts", "bad_rule"):
        sys.modules.pop(module, None)


CASES = {
    "variables in a place that cannot have them": (
        ("learner={type: bad-counter}",),
        (),
        r"learner: is a module with variables outside the model",
    ),
    "a stream without a seed": (
        ("model.decoder.layer.feed_forward={type: bad-unseeded}",),
        (),
        r"decoder\.layer\.feed_forward\.dropout\): has no source of random numbers",
    ),
    "more than the slot offers": (("input={type: bad-greedy}",), (), r"input: (.|\n)*requires width(.|\n)*seed"),
    "a feature of the mesh rule that is missing": (
        (),
        ("--target", "cpu-1"),
        r"applies 'warp', which is not installed\n    fix: pip install axlearn-plugins-loom(.|\n)*--without warp",
    ),
}


@pytest.mark.fast_cases(
    "check-a feature of the mesh rule that is missing",
    "check-more than the slot offers",
    "train-a feature of the mesh rule that is missing",
    "train-more than the slot offers",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_part_that_does_not_fit_is_one_clear_error(case, command, tmp_path, monkeypatch):
    settings, more, message = CASES[case]
    if more:
        monkeypatch.setenv("WITH_BAD_RULE", "1")
    run = tmp_path / "run"
    words = cli_runs.arguments(run, steps=1, settings=("input.batch_size=8", *settings), more=more)
    below = tuple(
        f"{setting.partition('=')[0]}." for setting in settings
    )  # which the part in their place does not have
    drop = {i for i, word in enumerate(words) if below and word.startswith(below)}
    words = [word for i, word in enumerate(words) if i not in drop and i + 1 not in drop]
    if command == "check":
        words = ["config", "check", "quickstart", *words[words.index("--steps") :]]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr), result.stderr
    assert not run.exists(), "nothing is written"
