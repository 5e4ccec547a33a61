"""Third-party components, named in YAML, in the place of each part of a trainer: all at once, and each alone."""

import json
import sys

import pytest

from axlearn_core.config import find
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train import train
from support import toy_models

PARTS = {
    "input": ("counting-input", "CountingInput", "{type: counting-input, batch_size: 8}"),
    "objective": ("counted-objective", "CountedObjective", "{type: counted-objective}"),
    "learner": ("sign-learner", "SignLearner", "{type: sign-learner}"),
    "checkpointer": ("npz-checkpointer", "NpzCheckpointer", "{type: npz-checkpointer, every: 2}"),
    "trackers": ("text-tracker", "TextTracker", "[{type: text-tracker, name: told.txt}]"),
    "loop": ("plain-loop", "PlainLoop", "{type: plain-loop}"),
}

RUN = """\
experiment: quickstart
set:
  model.decoder.num_layers: 1
  model.decoder.hidden_dim: 32
  model.decoder.layer.attention.num_heads: 4
  model.decoder.layer.feed_forward.hidden_dim: 64
  evaluators: {}
  log_every_steps: 1
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that only registers names; its module is `support.third_party`."""
    info = tmp_path / "site/third_party-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\nRequires-Dist: axlearn-core>=0.1\n"
    )
    lines = "".join(f"{name} = support.third_party:{kind}\n" for name, kind, _ in PARTS.values())
    (info / "entry_points.txt").write_text(f"[axlearn.components]\n{lines}")
    monkeypatch.syspath_prepend(str(info.parent))
    with toy_models.quick_to_compile():
        yield
    sys.modules.pop("support.third_party", None)


def run_file(tmp_path, *parts, settings=""):
    """A run file that names the parts."""
    file = tmp_path / f"{'-'.join(parts)}.yaml"
    file.write_text(RUN + "".join(f"  {part}: {PARTS[part][2]}\n" for part in parts) + settings)
    return file


def metrics_text(run_dir):
    """What the third party's tracker wrote, by step."""
    lines = [json.loads(line) for line in (run_dir / "told.txt").read_text().splitlines()]
    return lines, {line["step"]: line for line in lines if "step" in line}


@pytest.mark.slow
def test_all_at_once_train_stop_and_go_on(installed, tmp_path):
    file = run_file(tmp_path, *PARTS, settings="  model.vocab_size: 32\n")
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(file, steps=24, run_dir=whole)
    lines, steps = metrics_text(whole)
    assert lines[0] == {"start": 0}
    assert lines[-1] == {"closed": True}
    assert steps.keys() == set(range(1, 25))
    assert steps[24]["taken"] == 24, "the loop"
    assert steps[24]["rows"] == 8, "the objective"
    assert steps[24]["moved"] == pytest.approx(0.003), "the learner"
    assert steps[1]["loss"] > 3 > 1.5 > steps[24]["loss"], "the input counts, which is soon learnt"
    assert json.loads((whole / "run.lock.json").read_text())["data"] == {"kind": "counting"}
    names = {p.name for p in (whole / "checkpoints").iterdir()}
    assert {"2.npz", "24.npz"} <= names
    assert not (whole / "metrics.jsonl").exists(), "the trackers of the experiment are gone"
    config = (whole / "config.yaml").read_text()
    assert all(f"type: {name}" in config for name, _, _ in PARTS.values())

    train(file, steps=5, run_dir=run)
    result = train(file, steps=8, run_dir=run)
    assert result.step == 8
    lines, again = metrics_text(run)
    assert {"start": 5} in lines
    assert [again[s]["taken"] for s in (5, 6, 8)] == [5, 1, 3]
    assert [again[s]["loss"] for s in range(1, 9)] == [steps[s]["loss"] for s in range(1, 9)], "bit for bit"


def test_each_is_named_by_one_line(installed, tmp_path):
    for part, (_, kind, _) in PARTS.items():
        cfg = resolve(run_file(tmp_path, part)).check().config
        from support import third_party

        parts = find(cfg, getattr(third_party, kind))
        assert list(parts) == [f"{part}.0" if part == "trackers" else part]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_alone_among_ours(installed, tmp_path, part):
    settings = "  input.batch_size: 8\n  input.sequence_length: 32\n" if part != "input" else ""
    run = tmp_path / "run"
    result = train(run_file(tmp_path, part, settings=settings), steps=4, run_dir=run)
    assert result.step == 4
    if part == "trackers":
        assert metrics_text(run)[1].keys() == {1, 2, 3, 4}
    else:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [m["step"] for m in lines if "loss" in m] == [1, 2, 3, 4]
        assert all(m["loss"] > 0 for m in lines if "loss" in m)
        assert ("rows" in lines[0]) == (part == "objective")
        assert ("moved" in lines[0]) == (part == "learner")
        assert ("taken" in lines[0]) == (part == "loop")
    assert bool(list((run / "checkpoints").glob("*.npz"))) == (part == "checkpointer")
