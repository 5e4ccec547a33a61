"""kill -9 at seeded moments over ten shapes of runs: what is resumed is bit for bit what was never interrupted.

`AXLEARN_KILLS` is how many kills of the 200 are made for each shape, at most 20; the default is a sample.
"""

import os
import random
import time

import pytest
import tiny

SHAPES = {
    "plain": (),
    "workers": ("--set", "input.workers=2"),
    "accumulation": ("--with", "gradient-accumulation:steps=2"),
    "two-devices": ("--target", "cpu-2"),
    "every-step": (),
    "ema": ("--with", "ema"),
    "dropout": ("--with", "dropout:rate=0.1"),
    "moe": ("--with", "moe:num_experts=4"),
    "first-fit": ("--set", "input.packing=first-fit"),
    "remat": ("--with", "remat"),
}
STEPS, PER_SHAPE = 80, 20
KILLS = min(int(os.environ.get("AXLEARN_KILLS", "2")), PER_SHAPE)
MOMENTS = ("start", "compile", "step", "save", "restore")


def moment(name, run, at, begin):
    """When to kill: while it imports, in the first compilation, after a step, during a save, while it restores."""

    def ready():
        if name == "start":
            return time.monotonic() - begin > 0.05 * at
        if name in ("compile", "restore"):
            phases = run / "phases.jsonl"
            return (run / "run.lock.json").exists() and phases.exists() and time.monotonic() - begin > 1 + 0.1 * at
        if name == "step":
            return len(tiny.logged(run)) >= at
        folder = run / "checkpoints"
        return folder.exists() and any(not p.name.isdigit() for p in folder.iterdir())

    return ready


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_kills_leave_no_trace(shape, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    every = 1 if shape == "every-step" else 2
    arguments = {"steps": STEPS, "more": SHAPES[shape], "settings": (f"checkpointer.every_steps={every}",)}
    tiny.axlearn(*tiny.arguments(whole, **arguments), fresh=True)
    draw = random.Random(shape)
    for kill in range(KILLS):
        name = MOMENTS[kill % len(MOMENTS)] if len(MOMENTS) <= KILLS else draw.choice(MOMENTS)
        at = len(tiny.logged(run)) + draw.randint(1, 6)
        process = tiny.start(*tiny.arguments(run, **arguments))
        tiny.kill_when(process, moment(name, run, at, time.monotonic()))
        process.communicate()
    tiny.axlearn(*tiny.arguments(run, **arguments), fresh=True)
    assert tiny.losses(run) == tiny.losses(whole)
