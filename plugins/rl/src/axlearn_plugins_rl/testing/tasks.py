"""Suite for tasks."""

import json
import random
from itertools import islice
from typing import Any

import pytest

from axlearn_core.config import Node
from axlearn_plugins_rl.prompts import check_example, content_key, encode_prompt
from axlearn_plugins_rl.rewards.judge_process import pack_judge
from axlearn_plugins_rl.rewards.judged_reward import to_score
from axlearn_plugins_rl.rollout_contracts import Example, ScoresAnswers, Split, Task
from axlearn_plugins_rl.tasks.chat_task import find_scorer
from axlearn_plugins_rl.testing.rollouts import STRANGE_TEXTS
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

SPLITS: tuple[Split, ...] = ("train", "held_out")


class TaskSuite:
    """Tests that every task must pass.

    Attributes:
        config: Config of the task.
        seed: Seed of the run.
        limit: Number of examples of a split to read.
    """

    config: Node[Any]
    seed: int = 3
    limit: int = 200

    def task(self) -> Task:
        """Build the task, as an input does."""
        return self.config.build(seed=self.seed)

    def read(self, task: Task, split: Split) -> list[Example]:
        """Return the first examples of a split."""
        return [*islice(task.examples(split), self.limit)]

    def test_there_are_examples_to_train_on(self) -> None:
        assert len(self.task().examples("train")) > 0

    def test_examples_are_valid(self) -> None:
        task, text = self.task(), TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
        for split in SPLITS:
            for number, example in enumerate(self.read(task, split)):
                check_example(example, f"example {number} of {split}")
                assert encode_prompt(text, example), f"the prompt of example {number} of {split} has no tokens"

    def test_ids_are_unique(self) -> None:
        task = self.task()
        ids = [example.id for split in SPLITS for example in self.read(task, split)]
        repeated = sorted({name for name in ids if ids.count(name) > 1})
        assert not repeated, f"several examples have the ids {repeated[:3]}"

    def test_splits_share_no_example(self) -> None:
        task = self.task()
        train, held_out = ({content_key(e): e.id for e in self.read(task, split)} for split in SPLITS)
        shared = [(train[key], held_out[key]) for key in train.keys() & held_out.keys()]
        assert not shared, f"examples for training are also held out: {shared[:3]}"

    def test_an_index_always_returns_the_same_example(self) -> None:
        task, again = self.task(), self.task()
        for split in SPLITS:
            examples, others = task.examples(split), again.examples(split)
            in_order = self.read(task, split)
            assert len(examples) == len(others) >= len(in_order)
            numbers = [*range(len(in_order))]
            random.Random(0).shuffle(numbers)
            for number in numbers:
                assert examples[number] == in_order[number], (
                    f"example {number} of {split} changes when it is read again"
                )
                assert others[number] == in_order[number], f"example {number} of {split} differs in another process"
            if in_order:
                with pytest.raises(IndexError):
                    examples[len(examples)]

    def test_the_description_is_stable(self) -> None:
        facts = dict(self.task().describe())
        assert facts, "describe must identify the examples"
        assert json.loads(json.dumps(facts)) == facts, "describe must return JSON values"
        assert dict(self.task().describe()) == facts, "equal tasks must have equal descriptions"

    def test_scores_are_numbers(self) -> None:
        task = self.task()
        scorer = find_scorer(task)
        if not isinstance(scorer, ScoresAnswers):
            pytest.skip("needs a task that scores answers: define `score`")
        pack_judge(lambda: scorer.score, type(scorer))  # the reward `task` sends the task to another process
        example = self.read(task, "train")[0]
        for text in (*STRANGE_TEXTS, str(example.answer)):
            score = to_score(scorer.score(example, text))
            assert to_score(scorer.score(example, text)) == score, f"two scores of the text {text[:40]!r} differ"
