"""Evaluate rewards on held-out examples during training."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from axlearn_core.config import Node, node, setting
from axlearn_core.errors import Problem, RequestError, WorkError
from axlearn_core.train.evaluators import Periodic
from axlearn_core.train.session import Session
from axlearn_plugins_rl.prompts import show_prompt
from axlearn_plugins_rl.rollout_contracts import Group, Reward, RolloutSource
from axlearn_plugins_rl.rollout_jobs import collect_groups
from axlearn_plugins_rl.rollout_metrics import mean_pass_at, summarize_groups
from axlearn_plugins_rl.rollout_worker import RESOURCE, RolloutWorker
from axlearn_plugins_rl.task_input import Draw, TaskInput

EVALUATION_SEED = 2**32
"""Seed of the rollouts of evaluations. Seeds of runs are smaller, unless the user sets a larger one."""


class RewardEvaluator(Periodic):
    """The mean reward on held-out examples, and the share of examples that k attempts solve.

    The engine of the training loop samples, with the weights for evaluation. The seeds do not depend on the step. Each process of a
    job samples its share of the examples.
    """

    @node
    class Config(Periodic.Config["RewardEvaluator"]):
        """The examples and the rollouts.

        Attributes:
            samples: Rollouts per example.
            pass_at: Numbers k of attempts for `<name>_pass_at_<k>`, the probability that one of k attempts solves the example.
            solved: Smallest reward of a rollout that solves its example.
            max_examples: Maximum number of held-out examples, or None for all.
            reward: Scores the rollouts. None uses the reward of the training loop.
            source: Turns examples into rollouts. None uses the source of the training loop.
        """

        samples: int = setting(default=1, ge=1, le=2**16)
        pass_at: tuple[int, ...] = ()
        solved: float = 1.0
        max_examples: int | None = setting(default=None, ge=1)
        reward: Node[Reward] | None = None
        source: Node[RolloutSource] | None = None

        def validate(self) -> Iterable[Problem]:
            """Check that there are enough samples for `pass_at`."""
            for i, attempts in enumerate(self.pass_at):
                if not 1 <= attempts <= self.samples:
                    yield Problem(
                        path=f"pass_at.{i}",
                        message="needs as many samples per example as attempts",
                        got=str(attempts),
                        expected=f"1 to {self.samples}, the number of samples",
                        fix="raise `samples`",
                    )

    def __init__(self, cfg: Config, *, name: str, input: Any):
        super().__init__(cfg, name=name)
        if not isinstance(input, TaskInput):
            raise RequestError(
                f"evaluators.{name} needs the examples of a task\n    got: input is a {type(input).__name__}\n"
                f"    expected: a task-input\n    fix: remove it: evaluators.{name}=null"
            )
        self.samples, self.pass_at, self.solved = cfg.samples, cfg.pass_at, cfg.solved
        examples = input.examples("held_out")
        count = len(examples) if cfg.max_examples is None else min(cfg.max_examples, len(examples))
        self.draws = [Draw(i, examples[i]) for i in range(count)[input.share.select(count)]]
        self.source = None if cfg.source is None else cfg.source.build()
        self.reward = None if cfg.reward is None else cfg.reward.build(task=input.task)

    def run(self, session: Session) -> Mapping[str, float]:
        """Return the scalars of `summarize_groups`, and the shares of solved examples, with the prefix `<name>_`."""
        worker: RolloutWorker = session.share(RESOURCE, _raise_missing)
        weights = worker.fetch(session.program.weights(session.state))
        job = worker.submit(functools.partial(self._collect, worker, weights, session.step))
        work = f"the evaluation {self.name} after step {session.step}"
        groups = worker.exchange.gather_groups(lambda: (job.result(), {}), work).groups
        if worker.exchange.share.index == 0:  # it has the first example, and the trackers
            session.text(f"{self.name} answer", _show(groups[0]))
        values = summarize_groups(groups)
        values |= {f"pass_at_{k}": mean_pass_at(groups, k, self.solved) for k in self.pass_at}
        return {f"{self.name}_{key}": value for key, value in values.items()}

    async def _collect(self, worker: RolloutWorker, weights: Any, version: int) -> list[Group]:
        worker.load(weights, version, kind="evaluation")
        return await collect_groups(
            self.draws,
            policy=worker.policy,
            source=self.source or worker.source,
            reward=self.reward or worker.reward,
            group_size=self.samples,
            seed=EVALUATION_SEED,
        )


def _show(group: Group) -> str:
    return f"{show_prompt(group.example)}{group.rollouts[0].text}\n(reward {group.scores[0].value:g})"


def _raise_missing() -> RolloutWorker:
    raise WorkError("the reward evaluator found no engine: the training loop must be an rl-loop")
