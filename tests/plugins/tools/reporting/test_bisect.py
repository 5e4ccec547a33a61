"""Which changes move a metric: the search by itself, and over trainings."""

import json

import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.config import Node, node, patch
from axlearn_core.errors import RequestError
from axlearn_core.learn import AdamW
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_tools.reporting.bisect import (
    OutOfTrainings,
    Result,
    Score,
    Trainings,
    bisect,
    changes,
    is_clear,
    minimize,
    read_runs,
)
from support import api_runs
from support.paths import RUN_OF_LLAMA

SMALL = {
    **api_runs.SMALL,
    "mesh.shape": {"data": 4, "fsdp": 2},
}


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {1, 2, 5}, set(range(8))])
def test_what_is_left_fails_and_nothing_of_it_can_be_left_out(needed):
    *_, remaining = [list(range(8)), *minimize(range(8), lambda some: needed <= set(some))]
    assert set(remaining) == needed


@node
class Config(Node[None]):
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    seed: int = 0


def score(config):
    """`a` and `c` move the metric together; `b` by itself a little; `d` cannot be without `b`."""
    if config.d and not config.b:
        raise RequestError("d needs b")
    value = 10.0 * (config.a and config.c) + 0.5 * config.b
    return Score((value - 0.01, value, value + 0.01))


def test_changes_that_move_a_metric_together_are_named_and_others_are_not():
    result = bisect(Config(), Config(a=1, b=1, c=1, d=1, seed=9), "loss", score)
    assert [c.path for c in result.changes] == ["a", "b", "c", "d"], "a seed is noise"
    assert [c.path for c in result.moving] == ["a", "c"]
    assert result.moved is not None
    assert result.moved.mean == pytest.approx(10.0)
    assert [s.mean for s in result.alone if s] == [0.0, 0.0]


def test_runs_that_differ_by_their_seeds_alone_are_not_searched():
    result = bisect(Config(), Config(a=1), "loss", lambda config: Score((1.0 + config.a * 1e-3, 1.1, 0.9)))
    assert not result.moving
    assert not result.clear
    assert "by more than the variation across seeds" in result.ended
    assert is_clear(Score((1.0, 1.0)), Score((2.0, 2.0)))


def test_what_is_found_when_the_trainings_are_used_up_is_said():
    left = iter(range(4))

    def limited(config):
        if next(left, None) is None:
            raise OutOfTrainings
        return score(config)

    result = bisect(Config(), Config(a=1, b=1, c=1, d=1), "loss", limited)
    assert {"a", "c"} <= {c.path for c in result.moving}
    assert "limit on training runs" in result.ended


def test_a_change_is_the_smallest_part_that_can_be_set():
    old = resolve("quickstart", set={"learner.max_grad_norm": 2.0}).config
    new = resolve("quickstart", with_=["remat"], set={"model.decoder.num_layers": 3}).config
    remaining = {c.path: c.new for c in changes(old, new)}
    assert remaining.keys() == {"model.decoder.num_layers", "model.decoder.stack.remat", "learner.max_grad_norm"}
    assert patch(old, remaining) == new


def train(run, steps=2, **settings):
    ax.train("quickstart", set={**SMALL, **settings}, steps=steps, run_dir=run)
    return run


@pytest.mark.slow
def test_a_learning_rate_is_found_between_two_runs(tmp_path):
    first = train(tmp_path / "a", **{"learner.optimizer": AdamW(learning_rate=1e-5)})
    second = train(
        tmp_path / "b",
        **{"learner.optimizer": AdamW(learning_rate=0.05), "learner.max_grad_norm": 0.9, "log_every_steps": 3},
    )
    old, new = read_runs(first, second)
    trainings = Trainings("loss", 8, range(2), 40)
    result = bisect(old, new, "loss", trainings.score)
    assert [c.path for c in result.changes] == ["learner.optimizer.learning_rate", "learner.max_grad_norm"]
    assert [c.path for c in result.moving] == ["learner.optimizer.learning_rate"]
    assert trainings.count <= 12
    refusal = CliRunner().invoke(cli, ["config", "bisect", str(first), str(second), "--metric", "los"])
    assert refusal.exit_code == 2
    assert "unknown metric of a step 'los'\n    did you mean: loss?" in refusal.output


@pytest.mark.slow
def test_runs_of_different_data_are_refused(tmp_path):
    first = train(tmp_path / "a")
    second = train(tmp_path / "b", **{"input.sequence_length": 32})
    result = CliRunner().invoke(cli, ["config", "bisect", str(first), str(second)])
    assert result.exit_code == 2
    assert "the runs read different data" in result.output
    assert "input.sequence_length" in result.output


def test_options_reach_the_search(monkeypatch):
    one = Score((1.0, 1.0))

    def bisect_once(old, new, metric, score, progress):
        asked.append(metric)
        return Result(first=one, second=one, changes=(), moving=(), moved=one, alone=(), trainings=0, ended="equal")

    asked: list[object] = []
    module = "axlearn_plugins_tools.reporting.bisect"
    monkeypatch.setattr(f"{module}.bisect", bisect_once)
    monkeypatch.setattr(f"{module}.check_metric", lambda old, metric, steps: asked.append(steps))
    words = ["config", "bisect", str(RUN_OF_LLAMA), str(RUN_OF_LLAMA)]
    options = ["--metric", "accuracy", "--steps", "7", "--seeds", "2", "--max-runs"]
    few = CliRunner().invoke(cli, [*words, *options, "3"])
    assert few.exit_code == 2
    assert "--max-runs is too small" in few.stderr
    assert "at least 4" in few.stderr
    result = CliRunner().invoke(cli, [*words, *options, "4", "--json"])
    assert asked == [7, "accuracy"], result.output
    assert json.loads(result.stdout)["moving"] == []


def test_what_is_no_run_is_refused(tmp_path):
    result = CliRunner().invoke(cli, ["config", "bisect", str(tmp_path), str(tmp_path / "none")])
    assert result.exit_code == 2
    assert f"{tmp_path / 'none'} is not a directory" in result.output
    result = CliRunner().invoke(cli, ["config", "bisect", str(tmp_path), str(tmp_path)])
    assert result.exit_code == 2
    assert "is not a run directory" in result.output
