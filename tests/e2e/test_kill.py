"""kill -9 at random moments, during saves too: what is resumed is bit for bit what was never interrupted."""

import os
import random

import pytest

from support import cli_runs
from support.paths import TESTS

SETTINGS = ("checkpointer.every_steps=2",)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "orbax"])
def test_twenty_kills_leave_no_trace(kind, tmp_path):
    steps, kills, settings = 160, 20, (f"checkpointer={{type: {kind}, every_steps: 2}}",)
    whole, run = tmp_path / "whole", tmp_path / "run"
    cli_runs.axlearn(*cli_runs.arguments(whole, steps=steps, settings=settings))
    random_ = random.Random(0)
    in_save = 0
    for kill in range(kills):
        process = cli_runs.start(*cli_runs.arguments(run, steps=steps, settings=settings))
        at = len(cli_runs.logged(run)) + random_.randint(1, 6)
        saving = kill % 2 == 0

        def ready(at: int = at, saving: bool = saving) -> bool:
            # Every other kill waits for a save that is under way: a directory that does not have its final name yet.
            if len(cli_runs.logged(run)) < at:
                return False
            return not saving or any(not p.name.isdigit() for p in (run / "checkpoints").iterdir())

        killed = cli_runs.kill_when(process, ready)
        process.communicate()
        if not killed:
            break
        in_save += saving
    assert kill >= 15, "the run ended before it was killed often enough"
    assert in_save >= 5
    cli_runs.axlearn(*cli_runs.arguments(run, steps=steps, settings=settings))
    assert cli_runs.losses(run) == cli_runs.losses(whole)
    assert cli_runs.stored_state(run) == cli_runs.stored_state(whole)


KILLS, STEPS = 5, 60
STATE = {
    "dropout": ("dropout:rate=0.2",),
    "batch-norm": (),
    "router-bias": ("moe:num_experts=4,router={type: sigmoid-router}",),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATE)
def test_state_survives_five_kills(kind, tmp_path, monkeypatch):
    info = tmp_path / "site/stateful-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stateful\nVersion: 1.0\nRequires-Dist: axlearn-core>=0.1\n"
    )
    (info / "entry_points.txt").write_text("[axlearn.components]\nbatch-norm = support.stateful_models:BatchNorm\n")
    places = [str(info.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    norm = ("model.decoder.layer.norm={type: batch-norm}",) if kind == "batch-norm" else ()
    more = tuple(word for feature in STATE[kind] for word in ("--with", feature))
    arguments = {"steps": STEPS, "settings": (*SETTINGS, *norm), "more": more}
    whole, run = tmp_path / "whole", tmp_path / "run"
    cli_runs.axlearn(*cli_runs.arguments(whole, **arguments), fresh=True)
    random_ = random.Random(0)
    for kill in range(KILLS):
        process = cli_runs.start(*cli_runs.arguments(run, **arguments))
        at = len(cli_runs.logged(run)) + random_.randint(2, 8)
        killed = cli_runs.kill_when(process, lambda at=at: len(cli_runs.logged(run)) >= at)
        process.communicate()
        assert killed, f"the run ended before kill {kill + 1}"
    cli_runs.axlearn(*cli_runs.arguments(run, **arguments), fresh=True)
    assert cli_runs.losses(run) == cli_runs.losses(whole)
