"""Teach a small model to use a calculator: a task, an environment in which the policy takes two turns, and two training runs."""

import json
import random
import re

import axlearn_core as ax
from axlearn_core.config import Configurable, node
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.rewards.rollout_rewards import EnvironmentReward
from axlearn_plugins_rl.rollout_contracts import Example, Reply
from axlearn_plugins_rl.tasks.generated_task import GeneratedTask


class Products(GeneratedTask):
    """Products of two numbers."""

    def example(self, index, rng):
        """Return a product as a question."""
        a, b = rng.randrange(2, 100), rng.randrange(2, 100)
        return Example(id=str(index), prompt=({"role": "user", "content": f"{a}*{b}?"},), answer=str(a * b))


class Calculator(Configurable):
    """Answers `calc 6*7` with `42`. Any other message is the final answer."""

    @node
    class Config(Configurable.Config["Calculator"]):
        """No settings."""

    def __init__(self, cfg):
        pass

    async def start(self, example, *, seed):
        """Start an episode."""
        return CalculatorEpisode(example.answer)


class CalculatorEpisode:
    """One question."""

    def __init__(self, answer):
        self.answer = answer
        self.metrics = {"calls": 0.0}

    async def reply(self, message):
        """Return the product, or end the episode and judge the answer."""
        if call := re.fullmatch(r"calc (\d{1,4})\*(\d{1,4})", message["content"]):
            self.metrics["calls"] += 1
            return Reply(messages=({"role": "user", "content": str(int(call[1]) * int(call[2]))},))
        return Reply(done=True, reward=float(message["content"] == self.answer))

    async def close(self):
        """Do nothing. An episode holds no resources."""


def write_conversations(path, count=4000, share=0.3):
    """Write conversations for supervised training. A share of them uses the calculator, the others guess."""
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            a, b = rng.randrange(2, 100), rng.randrange(2, 100)
            texts = [f"{a}*{b}?", f"calc {a}*{b}", str(a * b), str(a * b)]
            if rng.random() > share:
                texts = [f"{a}*{b}?", str(rng.randrange(4, 9802))]
            roles = ("user", "assistant") * 2
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            file.write(json.dumps({"messages": messages}) + "\n")


MODEL = {
    "input.tokenizer": {"type": "byte-tokenizer"},
    "input.sequence_length": 96,
    "model.vocab_size": 264,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 64,
    "model.decoder.layer.feed_forward.hidden_dim": 192,
    "evaluators": {},
}


def train_base(run_dir, data="conversations.jsonl", steps=600):
    """Train on conversations. The model learns the format, and uses the calculator in some of its answers."""
    write_conversations(data)
    rate = {"type": "cosine-schedule", "peak": 1e-2}
    settings = {"input.batch_size": 32, "learner.optimizer": {"type": "adamw", "learning_rate": rate}}
    return ax.train(
        "quickstart", with_={"chat": {"data": data}}, set={**MODEL, **settings}, steps=steps, run_dir=run_dir
    )


def train_policy(run_dir, base, steps=40):
    """Train with rewards: only the calculator gives right answers."""
    grpo = {"base": base, "group_size": 8, "batch_size": 8, "task": Products.Config(), "kl": 0.0}
    settings = {
        "loop.source": MultiTurn.Config(environment=Calculator.Config(), max_turns=3, max_tokens=16),
        "loop.reward": EnvironmentReward.Config(),
        "learner.optimizer": {"type": "adamw", "learning_rate": 1e-3},
        "log_every_steps": 1,
    }
    return ax.train(f"{base}/config.yaml", with_={"grpo": grpo}, set=settings, steps=steps, run_dir=run_dir)


if __name__ == "__main__":
    train_base("runs/base")
    train_policy("runs/calculator", "runs/base")
