"""Training runs on rollouts in `parity` mode, each in a process with one device."""

import subprocess
import sys

import numpy as np

import axlearn_core as ax
from axlearn_core.config import Configurable, node
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.rewards.rollout_rewards import LengthReward
from axlearn_plugins_rl.rollout_contracts import Reply
from axlearn_plugins_rl.rollout_records import read_rollouts
from support import cli_runs
from support.paths import ROOT
from support.rl_rewards import Sums
from support.score_parity import Scores

FAMILIES = {
    "dense": {},
    "moe": {"moe": {"num_experts": 4}},
    "mla": {"mla": {}},
    "lora": {"lora": {"target": "model.**"}},
}
"""Family -> features of its model, with their options."""
STOPS = tuple(map(chr, range(ord("!"), ord("~"))))
"""Texts that end an answer: a model without training writes one in few tokens."""


class Chatter(Configurable):
    """Replies with texts of different lengths."""

    @node
    class Config(Configurable.Config["Chatter"]):
        """Number of turns."""

        turns: int = 3

    def __init__(self, cfg):
        self.turns = cfg.turns

    async def start(self, example, *, seed):
        return ChatterEpisode(self.turns, seed)


class ChatterEpisode:
    """One conversation."""

    def __init__(self, turns, seed):
        self.turns, self.seed, self.replies, self.metrics = turns, seed, 0, {}

    async def reply(self, message):
        self.replies += 1
        text = "more " * (1 + (self.seed + self.replies) % 5)
        return Reply(messages=({"role": "user", "content": text},), done=self.replies == self.turns)

    async def close(self):
        pass


def start_run(run, **options):
    """Train in a process of its own, and return the metrics of each step. See `train` for the options."""
    call = f"from support.exact_rollouts import train; train({str(run)!r}, **{options!r})"
    command = [sys.executable, "-c", call]
    environment = cli_runs.environment()
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT / "tests", timeout=900)
    assert process.returncode == 0, process.stderr[-5000:]
    return [row for row in cli_runs.metrics(run) if "loss" in row]


def train(
    run,
    *,
    family="dense",
    turns=1,
    batch_size=4,
    group_size=4,
    length=16,
    ahead=0,
    steps=3,
    mode="parity",
    settings=(),
):
    """Train. Each step saves a checkpoint, and writes the rollouts with their log-probabilities."""
    options = {
        "task": Sums.Config(digits=1),
        "batch_size": batch_size,
        "group_size": group_size,
        "ahead": ahead,
        "kl": 0.0,
    }
    by_path = {
        "model.vocab_size": 264,
        "model.decoder.num_layers": 2,
        "model.decoder.hidden_dim": 64,  # parity needs products of this width
        "model.decoder.layer.attention.num_heads": 2,
        "model.decoder.layer.feed_forward.hidden_dim": 64,
        "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
        "input.tokenizer": {"type": "byte-tokenizer"},
        "input.sequence_length": length,
        "loop.policy.engine.runner.mode": mode,
        "loop.policy.max_tokens": 12,
        "loop.log.logprobs": True,
        "loop.reward": LengthReward.Config(limit=48, margin=48),
        "checkpointer.every_steps": 1,
        "checkpointer.keep_last": steps,
        "log_every_steps": 1,
        "evaluators": {},
        "trackers": [{"type": "jsonl"}],
        **dict(settings),
    }
    if turns > 1:
        by_path["loop.policy.stop"] = STOPS
        by_path["loop.source"] = MultiTurn.Config(environment=Chatter.Config(turns=turns), max_turns=turns)
    features = {**FAMILIES[family], "grpo": options, "batch-invariant": {}}
    ax.train("quickstart", with_=features, set=by_path, steps=steps, run_dir=run)


def count_differences(run, step, version, drawn_by=None):
    """Compare the log-probabilities that a step's rollouts recorded with those of the training program at a version.

    Args:
        run: Run directory.
        step: Step that trained on the rollouts.
        version: Version to compare with.
        drawn_by: Version that drew the rollouts, if it is another one.

    Returns:
        Number of tokens, and number of those whose log-probabilities differ in any bit.
    """
    loaded = ax.load(run, step=version)
    scores, counts = Scores(loaded.config.model, loaded.model, length=192), np.zeros(2, int)
    for group in read_rollouts(run / "rollouts" / f"step-{step}.jsonl"):
        for rollout in group.rollouts[:2]:
            for trajectory in rollout.trajectories:
                tokens = []
                for segment in trajectory:
                    if segment.drawn:
                        assert segment.version == (version if drawn_by is None else drawn_by)
                        expected = scores([*tokens, *segment.tokens], len(tokens))
                        counts += len(expected), np.sum(expected != segment.model_logprobs)
                    tokens += segment.tokens.tolist()
    return tuple(counts.tolist())
