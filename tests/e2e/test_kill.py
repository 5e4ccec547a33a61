"""kill -9 at random moments, during saves too: what is resumed is bit for bit what was never interrupted."""

import os
import random
from pathlib import Path

import pytest
import tiny

SETTINGS = ("checkpointer.every_steps=2",)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "orbax"])
def test_twenty_kills_leave_no_trace(kind, tmp_path):
    steps, kills, settings = 160, 20, (f"checkpointer={{type: {kind}, every_steps: 2}}",)
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny.axlearn(*tiny.arguments(whole, steps=steps, settings=settings))
    random_ = random.Random(0)
    in_save = 0
    for kill in range(kills):
        process = tiny.start(*tiny.arguments(run, steps=steps, settings=settings))
        at = len(tiny.logged(run)) + random_.randint(1, 6)
        saving = kill % 2 == 0

        def ready(at: int = at, saving: bool = saving) -> bool:
            # Every other kill waits for a save that is under way: a directory that does not have its final name yet.
            if len(tiny.logged(run)) < at:
                return False
            return not saving or any(not p.name.isdigit() for p in (run / "checkpoints").iterdir())

        killed = tiny.kill_when(process, ready)
        process.communicate()
        if not killed:
            break
        in_save += saving
    assert kill >= 15, "the run ended before it was killed often enough"
    assert in_save >= 5
    tiny.axlearn(*tiny.arguments(run, steps=steps, settings=settings))
    assert tiny.losses(run) == tiny.losses(whole)
    assert tiny.stored_state(run) == tiny.stored_state(whole)


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
    (info / "entry_points.txt").write_text("[axlearn.components]\nbatch-norm = stateful:BatchNorm\n")
    places = [str(info.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    norm = ("model.decoder.layer.norm={type: batch-norm}",) if kind == "batch-norm" else ()
    more = tuple(word for feature in STATE[kind] for word in ("--with", feature))
    arguments = {"steps": STEPS, "settings": (*SETTINGS, *norm), "more": more}
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny.axlearn(*tiny.arguments(whole, **arguments), fresh=True)
    random_ = random.Random(0)
    for kill in range(KILLS):
        process = tiny.start(*tiny.arguments(run, **arguments))
        at = len(tiny.logged(run)) + random_.randint(2, 8)
        killed = tiny.kill_when(process, lambda at=at: len(tiny.logged(run)) >= at)
        process.communicate()
        assert killed, f"the run ended before kill {kill + 1}"
    tiny.axlearn(*tiny.arguments(run, **arguments), fresh=True)
    assert tiny.losses(run) == tiny.losses(whole)
