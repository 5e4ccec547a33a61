"""The gate stops drafting when it is slower, tries again, and changes no output."""

import random

import pytest

from axlearn_plugins_serving.draft_gate import FIRST_PROBE, SAMPLES, SETTLING, DraftGate
from axlearn_plugins_serving.drafting import NgramDrafter
from support import fake_runner
from support.engine_runs import CONTEXT, END, VOCABULARY, engine, requests_at_random, run, tokens
from support.fake_runner import expected


def simulate(gate, steps, with_drafts, without, rows=3):
    """Return whether each of some steps drafts. Each mode is (seconds per step, tokens per request)."""
    modes = []
    for _ in range(steps):
        modes.append(gate.allows(rows))
        seconds, count = with_drafts if modes[-1] else without
        gate.record(rows, rows * count, seconds)
    return modes


def test_the_faster_mode_runs_most_of_the_time():
    for with_drafts, without, faster in (
        ((2.0, 3), (1.0, 1), True),
        ((2.0, 1), (1.0, 1), False),
        ((1.5, 1), (1.4, 1), False),
    ):
        modes = simulate(DraftGate(), 2000, with_drafts, without)
        assert modes[: SETTLING + SAMPLES] == [True] * (SETTLING + SAMPLES)
        assert modes.count(faster) > 0.9 * len(modes)
        assert modes[100:].count(not faster) >= SAMPLES  # the slower mode is measured again


def test_the_mode_changes_with_the_acceptance():
    gate = DraftGate()
    simulate(gate, 200, (2.0, 1), (1.0, 1))
    assert not gate.allows(3)
    modes = simulate(gate, 20 * FIRST_PROBE, (2.0, 5), (1.0, 1))
    assert modes[-1]
    assert modes.count(True) > len(modes) // 2


def test_batches_of_different_sizes_have_their_own_mode():
    gate = DraftGate()
    for _ in range(60):
        for rows, cost in ((1, 1.2), (16, 3.0)):
            drafts = gate.allows(rows)
            gate.record(rows, rows * (2 if drafts else 1), cost if drafts else 1.0)
    assert gate.allows(1)
    assert not gate.allows(16)


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 17}, {"decode_steps": 3}, {"chunk": 8, "max_step_tokens": 30}])
def test_outputs_do_not_depend_on_the_gate(sizes, monkeypatch):
    hashed, rng = fake_runner._hash, random.Random(0)
    monkeypatch.setattr(fake_runner, "_hash", lambda version, tokens, salt=b"": hashed(version, tokens[-2:], salt) % 5)
    one = engine(settings={"drafter": NgramDrafter.Config(ngram=2, length=5)}, **sizes)
    one._gate.allows = lambda rows: rng.random() < 0.5  # changes at any moment
    requests = requests_at_random(random.Random(1), 100)
    outputs = run(one, requests, rng=random.Random(2))
    for request in requests:
        want, reason = expected(
            request.prompt,
            request.sampling,
            max_context=CONTEXT,
            vocab_size=VOCABULARY,
            end_tokens=END,
            seed=request.sampling.seed,
        )
        assert (tokens(outputs[request.id]), outputs[request.id][-1].finish) == (want, reason)
    assert one.statistics().accepted_tokens > 0
