import types

import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, RequestError, WorkError
from axlearn_plugins_rl.process_share import ProcessShare
from axlearn_plugins_rl.reward_evaluator import EVALUATION_SEED, RewardEvaluator
from axlearn_plugins_rl.rewards.text_rewards import ExactReward
from axlearn_plugins_rl.rollout_contracts import Score
from axlearn_plugins_rl.rollout_exchange import RolloutExchange
from axlearn_plugins_rl.rollout_worker import RolloutWorker
from axlearn_plugins_rl.single_turn import SingleTurn
from axlearn_plugins_rl.task_input import TaskInput
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.rollout_groups import ConstantPolicy, Sums


class Engine:
    def close(self):
        pass


class Sync:
    def __init__(self):
        self.pushed = []

    def push(self, weights, version):
        self.pushed.append((weights, version))
        return 8


class Session:
    """What an evaluator reads of a session."""

    def __init__(self, worker, step=7):
        self.worker, self.step, self.state, self.texts = worker, step, "state", []
        self.program = types.SimpleNamespace(weights=lambda state: f"weights of {state}")

    def share(self, name, build):
        return self.worker or build()

    def text(self, name, value):
        self.texts.append((name, value))


class EvenSeeds:
    """Rewards rollouts with even seeds. The third rollout of each example fails."""

    async def score(self, rollouts):
        errors = [None, None, "failed", None]
        return [
            Score(value=float(r.seed % 2 == 0), error=e) for r, e in zip(rollouts, errors[: len(rollouts)], strict=True)
        ]


@pytest.fixture
def worker():
    policy = ConstantPolicy()
    policy.engine = Engine()
    instance = RolloutWorker(policy, Sync(), SingleTurn.Config().build(), EvenSeeds())
    yield instance
    instance.close()


def build(held_out=3, process_index=0, process_count=1, **options):
    config = TaskInput.Config(
        task=Sums.Config(held_out=held_out),
        tokenizer=ByteTokenizer.Config(),
        sequence_length=16,
        batch_size=2,
        group_size=2,
    )
    source = config.build(process_index=process_index, process_count=process_count)
    return RewardEvaluator.Config(every_steps=1, **options).build(name="eval", input=source)


def test_held_out_examples_are_scored_with_the_weights_of_the_step(worker):
    session = Session(worker)
    values = build(samples=2).run(session)
    seeds = worker.policy.seeds
    assert len(seeds) == 6
    assert values["eval_reward"] == pytest.approx(sum(seed % 2 == 0 for seed in seeds) / 6)
    assert values["eval_answer_length"] == 2.0
    assert not any(name.startswith("eval_pass_at") for name in values)
    assert worker._sync.pushed == [("weights of state", 7)]
    assert worker._loaded == ("evaluation", 7)
    (name, shown) = session.texts[0]
    assert name == "eval answer"
    assert shown.startswith("10+1=")
    assert "(reward " in shown


def test_seeds_do_not_depend_on_the_step(worker):
    evaluator = build(samples=2)
    evaluator.run(Session(worker, step=1))
    first = list(worker.policy.seeds)
    worker.policy.seeds.clear()
    evaluator.run(Session(worker, step=2))
    assert sorted(worker.policy.seeds) == sorted(first)
    assert EVALUATION_SEED > 2**32 - 1


def test_pass_at_counts_failed_rewards_as_unsolved(worker):
    values = build(held_out=1, samples=4, pass_at=(1, 4)).run(Session(worker))
    seeds = worker.policy.seeds
    solved = sum(seed % 2 == 0 for i, seed in enumerate(seeds) if i != 2)
    assert values["eval_pass_at_1"] == pytest.approx(solved / 4)
    assert values["eval_pass_at_4"] == float(solved > 0)
    assert values["eval_reward_errors"] == 0.25


def test_a_reward_and_a_limit_of_its_own(worker):
    evaluator = build(max_examples=2, reward=ExactReward.Config())
    values = evaluator.run(Session(worker))
    assert len(worker.policy.seeds) == 2
    assert values["eval_reward"] == 0.0, "the policy answers with one digit, and the sums have two"
    assert len(build(max_examples=50).draws) == 3


def test_more_attempts_than_samples_are_refused():
    with pytest.raises(ConfigError, match=r"pass_at.1: needs as many samples[\s\S]*got: 8[\s\S]*expected: 1 to 4"):
        check(RewardEvaluator.Config(every_steps=1, samples=4, pass_at=(1, 8)))


def test_other_inputs_and_loops_are_refused():
    with pytest.raises(
        RequestError, match=r"evaluators.eval needs the examples of a task[\s\S]*got: input is a object"
    ):
        RewardEvaluator.Config(every_steps=1).build(name="eval", input=object())
    with pytest.raises(WorkError, match="the training loop must be an rl-loop"):
        build().run(Session(None))


def test_processes_share_the_examples_and_the_result(worker):
    """Each share is evaluated alone, and the scores of the other one arrive from its process."""
    evaluators = [build(samples=2, process_index=i, process_count=2) for i in range(2)]
    ids = [[draw.example.id for draw in evaluator.draws] for evaluator in evaluators]
    assert ids == [["10", "11"], ["12"]]
    expected = build(samples=2).run(Session(worker))
    scored = {}
    for exchange in (Recorder(scored), Recorder(scored, index=0), Recorder(scored, index=1)):
        worker.exchange = exchange
        evaluator = evaluators[exchange.share.index]
        session = Session(worker)
        values = evaluator.run(session)
        assert len(session.texts) == (exchange.share.index == 0)
    assert values == expected


class Recorder(RolloutExchange):
    """Sends the rows of all processes, as far as they are known."""

    def __init__(self, rows, index=1):
        super().__init__(ProcessShare(index, 2))
        self.rows = rows

    def gather(self, value, work, *, error=None):
        assert error is None
        self.rows[self.share.index] = value
        return [self.rows.get(index, value) for index in range(2)]
