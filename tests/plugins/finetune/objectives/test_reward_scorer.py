"""A trained reward model scores text as its objective does."""

import json

import jax
import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_core.run import Run, bind_weights
from axlearn_plugins_finetune.objectives.reward_scorer import RewardScorer
from support.cli_runs import SETTINGS, axlearn

PAIRS = [{"prompt": f"{i} and ", "chosen": f"{i + 1}.", "rejected": f"{i}! " * (1 + i % 5)} for i in range(20)]


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """Train a reward model for a few steps, with moving averages, and return its run."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in PAIRS))
    settings = (
        "input.tokenizer={type: byte-tokenizer}",
        "model.vocab_size=264",
        "learner.ema_decay=0.5",
        "evaluators={}",
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        words = [w for s in (*SETTINGS, *settings) for w in ("--set", s)]
        axlearn(
            "train", "quickstart", "--with", "reward-model:data=pairs.jsonl", "--run-dir", "run", "--steps", "3", *words
        )
        axlearn("train", "quickstart", "--with", "dpo:data=pairs.jsonl", "--run-dir", "other", "--steps", "1", *words)
    return folder / "run"


@pytest.mark.slow
def test_rewards_are_those_of_the_averaged_weights(reward):
    scorer = RewardScorer.open(str(reward))
    pairs = [(row["prompt"], row[kind]) for row in PAIRS for kind in ("chosen", "rejected")]
    weights = Run(reward).weights()
    model = bind_weights(weights.functional, weights.read())
    head = weights.read_objective()["head.weight"]
    state = weights.checkpoint.read({"params.objective.head.weight": jax.ShapeDtypeStruct(head.shape, head.dtype)})
    assert abs(np.asarray(head) - next(iter(state.values()))).max() > 0, "the head has its own moving average"
    expected = []
    for prompt, answer in pairs:
        row = scorer.encoder.join(prompt, answer)[0][:-1]
        assert bytes(row[1:]).decode() == prompt + answer
        hidden, _ = model.hidden_states({"tokens": np.int32([row])})
        expected.append(float(np.asarray(hidden[0, -1], np.float64) @ np.asarray(head, np.float64)[:, 0]))
    np.testing.assert_allclose(scorer.score(pairs), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scorer.score(pairs[::-1])[::-1], scorer.score(pairs), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_be_scored_is_refused(reward):
    scorer = RewardScorer.open(str(reward))
    with pytest.raises(RequestError, match=f"at most {scorer.length}, the length of the rows in training"):
        scorer.score([("a" * scorer.length, "b")])
    with pytest.raises(RequestError, match=r"other is not a reward model\n    got: the objective DPO.Config"):
        RewardScorer.open(str(reward.parent / "other"))
