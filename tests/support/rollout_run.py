"""A training run on rollouts of a toy model, as a process of its own.

    python -m support.rollout_run RUN --steps 16 [--feature grpo] [--ahead 1] [--turns 3] [--judge] [--set path=value]

The rewards depend on the text only. Each call to the reward adds a line to the file `RUN.scored`.
"""

import argparse
from pathlib import Path

import jax

import axlearn_core as ax
from axlearn_core.config import Configurable, node
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.rewards import JudgedReward
from axlearn_plugins_rl.rollout_contracts import Reply, Score
from support import cli_runs
from support.rl_rewards import Sums


def grade(text):
    """A score that a model without training earns at times."""
    return sum(character.isalnum() for character in text) / 4


class Marked(Configurable):
    """Scores in the training process."""

    @node
    class Config(Configurable.Config["Marked"]):
        """The file of marks."""

        marks: str = ""

    def __init__(self, cfg, *, task=None):
        self.marks = Path(cfg.marks)

    async def score(self, rollouts):
        with self.marks.open("a") as file:
            file.write("scored\n")
        return [Score(value=grade(rollout.text)) for rollout in rollouts]


class Broken(Configurable):
    """Raises an error in one process of a job, after some calls."""

    @node
    class Config(Configurable.Config["Broken"]):
        """The process, and the number of calls before the error."""

        process: int = 0
        calls: int = 0

    def __init__(self, cfg, *, task=None):
        self.cfg, self.calls = cfg, 0

    async def score(self, rollouts):
        self.calls += 1
        if jax.process_index() == self.cfg.process and self.calls > self.cfg.calls:
            raise ValueError("the reward is broken")
        return [Score(value=grade(rollout.text)) for rollout in rollouts]


class Judged(JudgedReward):
    """Scores in worker processes."""

    @node
    class Config(JudgedReward.Config):
        """The file of marks."""

        marks: str = ""

    def judge(self, example, text):
        with Path(self.config.marks).open("a") as file:
            file.write("scored\n")
        return grade(text)


class Echo(Configurable):
    """Answers with the length of the message, and ends after two answers."""

    @node
    class Config(Configurable.Config["Echo"]):
        """No settings."""

    def __init__(self, cfg):
        pass

    async def start(self, example, *, seed):
        return EchoEpisode()


class EchoEpisode:
    """One episode."""

    def __init__(self):
        self.turns, self.metrics = 0, {}

    async def reply(self, message):
        self.turns += 1
        if self.turns > 2:
            return Reply(done=True, reward=grade(message["content"]))
        return Reply(messages=({"role": "user", "content": str(len(message["content"]))},))

    async def close(self):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--feature", default="grpo")
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--breaks", help="process and number of calls of its reward before an error: 1,4")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    task = Sums.Config(digits=1)
    options = {"task": task, "batch_size": 4, "group_size": 4, "max_tokens": 4, "ahead": args.ahead, "kl": 0.0}
    texts = [text for text in cli_runs.SETTINGS if not text.startswith(("input.", "checkpointer."))]
    settings = {
        "model.vocab_size": 264,
        "model.decoder.hidden_dim": 64,  # parity needs products of this width
        "input.tokenizer": {"type": "byte-tokenizer"},
        "input.sequence_length": 64 if args.turns > 1 else 16,
        "loop.policy.engine.runner.mode": "parity",
        "loop.reward": (Judged if args.judge else Marked).Config(marks=f"{args.run}.scored"),
        "checkpointer.every_steps": 2,
        "trackers": [{"type": "jsonl"}],
    }
    if args.breaks:
        process, calls = map(int, args.breaks.split(","))
        settings["loop.reward"] = Broken.Config(process=process, calls=calls)
    if args.turns > 1:
        settings["loop.source"] = MultiTurn.Config(environment=Echo.Config(), max_turns=args.turns, max_tokens=4)
    resolved = ax.resolve("quickstart", with_={args.feature: options, "batch-invariant": {}}, set=settings)
    ax.train(resolved.config, set=[*texts, *args.set], steps=args.steps, run_dir=args.run)


if __name__ == "__main__":
    main()
