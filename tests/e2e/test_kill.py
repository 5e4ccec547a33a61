"""kill -9 at random moments, during saves too: what is resumed is bit for bit what was never interrupted."""

import random

import pytest
import tiny

SETTINGS = ("checkpointer.every_steps=2",)


@pytest.mark.slow
def test_twenty_kills_leave_no_trace(tmp_path):
    steps, kills = 160, 20
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny.axlearn(*tiny.arguments(whole, steps=steps, settings=SETTINGS))
    random_ = random.Random(0)
    in_save = 0
    for kill in range(kills):
        process = tiny.start(*tiny.arguments(run, steps=steps, settings=SETTINGS))
        at = len(tiny.losses(run)) + random_.randint(1, 6)
        saving = kill % 2 == 0

        def ready(at: int = at, saving: bool = saving) -> bool:
            # Every other kill waits for a save that is under way: a directory that does not have its final name yet.
            if len(tiny.losses(run)) < at:
                return False
            return not saving or any(not p.name.isdigit() for p in (run / "checkpoints").iterdir())

        killed = tiny.kill_when(process, ready)
        process.communicate()
        if not killed:
            break
        in_save += saving
    assert kill >= 15, "the run ended before it was killed often enough"
    assert in_save >= 5
    tiny.axlearn(*tiny.arguments(run, steps=steps, settings=SETTINGS))
    assert tiny.losses(run) == tiny.losses(whole)
