"""The input of one of several processes fails: all save what was trained, and a second run goes on from there."""

import subprocess
import sys

import pytest

from support import cli_runs
from support.cli_jobs import start, together

FAILING = """
import os, sys
from axlearn_core.train.trainer import Trainer

build = Trainer.Config.build_input

class Failing:
    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __next__(self):
        self.count += 1
        if self.count == 9:
            raise ValueError("row 17 is no text")
        return next(self.batches)

    def __getattr__(self, name):
        return getattr(self.batches, name)

def build_input(self, own, vocab_size):
    source = build(self, own, vocab_size)
    train = source.train
    source.train = lambda: Failing(train())
    return source

if os.environ["JAX_PROCESS_ID"] == "1":
    Trainer.Config.build_input = build_input
from axlearn_core.__main__ import main
sys.argv[0] = "axlearn"
main()
"""


@pytest.mark.slow
def test_an_input_that_fails_in_one_process_saves_first(tmp_path, monkeypatch):
    run, popen = tmp_path / "run", subprocess.Popen
    settings = ("checkpointer.every_steps=1000",)
    with monkeypatch.context() as patch:
        patch.setattr(
            subprocess,
            "Popen",
            lambda words, **fields: popen([sys.executable, "-c", FAILING, *words[3:]], **fields),
        )
        processes = start(cli_runs.arguments(run, steps=60, settings=settings))
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], errors
    for text in errors:
        assert "the input of process 1 failed: ValueError: row 17 is no text" in text
        assert "saved step " in text
    (saved,) = [int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()]
    assert 5 <= saved <= 8  # of the eight batches before the bad one
    together(cli_runs.arguments(run, steps=12, settings=settings))  # with better data
    alone = tmp_path / "alone"
    together(cli_runs.arguments(alone, steps=12, settings=settings))
    assert cli_runs.losses(run) == cli_runs.losses(alone)
