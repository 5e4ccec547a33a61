"""Every function of an experiment works under every layout, and no function changes its kernel in silence."""

import json

import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.train import api
from axlearn_plugins_transformer.functions import ScoreBucket
from support import toy_models
from support.parallelisms import PARALLELISMS, together

METHODS = {"ring": "ring", "all-gather": "context-all-gather", "all-to-all": "context-all-to-all"}
BUILDS_STATE = ("init", "begin", "weights", "unstack")


def program_of(parallelism):
    features, shape = together(parallelism)
    small = patch(
        toy_models.small("quickstart"), {"model.decoder.num_layers": 4 if parallelism == "interleaved" else 2}
    )
    cfg = toy_models.resolve(small, with_=features).config
    cfg = patch(cfg, {"mesh": Mesh(shape=shape, rules=cfg.mesh.rules)})
    return compose(cfg, jax.devices()[: int(np.prod(list(shape.values())))])


def trace_all(program):
    """Traces each function for a batch; returns the decisions that were reported."""
    decisions = []
    program.kernel_notes.listener = decisions.append
    for name in program.functions:
        if name not in BUILDS_STATE:
            program.trace(name, program.function(name).get_bucket(toy_models.batch()))
    return decisions


@pytest.mark.parametrize(
    "parallelism",
    [pytest.param(n, marks=() if n == "pipeline" else pytest.mark.slow) for n in PARALLELISMS if n not in METHODS],
)
def test_layouts_that_name_no_kernel_decide_nothing(parallelism):
    assert trace_all(program_of(parallelism)) == []


@pytest.mark.fast_cases("all-to-all")
@pytest.mark.parametrize("parallelism", METHODS)
def test_functions_report_a_fallback_from_the_kernel_of_a_layout(parallelism):
    program, kernel = program_of(parallelism), METHODS[parallelism]
    decisions = trace_all(program)
    used = {name: {c.name for c in program.choices(name) if c.op.name == "attention"} for name in program.functions}
    assert all(kernel in used[name] for name in ("train", "evaluate", "score"))
    reason = "queries and keys are not the same positions"
    assert [(d.kind, d.subject, d.reason) for d in decisions] == [
        ("kernel", f"{name}: attention uses xla instead of {kernel}", reason) for name in ("prefill", "decode")
    ]
    program.trace("score", ScoreBucket(2, 15, 5))
    assert "the sequence length 15 is not divisible" in decisions[-1].reason


@pytest.mark.slow
def test_a_run_under_a_layout_samples_and_keeps_the_decision(tmp_path, capfd):
    settings = {
        **toy_models.SIZES,
        "model.vocab_size": 2048,
        "input.batch_size": 8,
        "input.sequence_length": 32,
        "mesh.shape": {"seq": 2, "fsdp": 4},
        "evaluators.sample.max_tokens": 2,
    }
    result = api.train("quickstart", with_=["context-parallel"], steps=1, set=settings, run_dir=tmp_path / "run")
    lock = json.loads((result.run_dir / "run.lock.json").read_text())
    subjects = [d["subject"] for d in lock["decisions"] if d["kind"] == "kernel"]
    assert subjects == [f"{name}: attention uses xla instead of ring" for name in ("prefill", "decode")]
    printed = capfd.readouterr().err
    assert all(f"kernel: {subject} (" in printed for subject in subjects)
