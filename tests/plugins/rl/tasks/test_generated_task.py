"""Tasks whose examples are computed."""

import attrs
import numpy as np
import pytest

from axlearn_core.errors import ConfigError, InputError, RequestError
from axlearn_plugins_rl.prompts import content_key, encode_prompt
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.tasks import GeneratedTask
from axlearn_plugins_rl.tasks.chat_task import ChatTask
from axlearn_plugins_rl.tasks.reasoning_gym_task import ReasoningGymTask
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.rl_rewards import Sums


class Fixed(GeneratedTask):
    """A task that returns the same example, or the items of a list."""

    items = (Example(id="a", prompt="x"),)

    def example(self, index, rng):
        return self.items[index % len(self.items)]


def test_a_share_is_held_out_by_content():
    task = Sums.Config(size=300, digits=1, validation_fraction=0.3).build()
    train, held_out = task.examples("train"), task.examples("held_out")
    assert len(train) + len(held_out) == 300
    assert 40 < len(held_out) < 140
    assert not {*map(content_key, train)} & {*map(content_key, held_out)}
    assert len({*map(content_key, train)}) < len(train), "this test needs duplicates"


def test_examples_depend_on_the_seed_and_the_index():
    examples = Sums.Config().build(seed=3).examples("train")
    assert list(examples) == [*Sums.Config().build(seed=3).examples("train")]
    assert examples[5] == examples[np.int64(5)] == list(examples[4:6])[1]
    assert [*examples[:9]] != [*Sums.Config().build(seed=4).examples("train")[:9]]
    assert Sums.Config(seed=3).build(seed=4).describe() == Sums.Config().build(seed=3).describe()
    with pytest.raises(IndexError):
        examples[len(examples)]


def test_the_description_changes_with_the_examples():
    facts = Sums.Config().build().describe()
    assert facts == Sums.Config().build().describe()
    for config, seed in ((Sums.Config(), 1), (Sums.Config(digits=3), 0), (Sums.Config(size=999), 0)):
        assert config.build(seed=seed).describe() != facts


def test_all_examples_can_be_for_training():
    task = Sums.Config(validation_fraction=0.0).build()
    assert (len(task.examples("train")), len(task.examples("held_out"))) == (1000, 0)


def test_a_task_without_examples_is_reported():
    with pytest.raises(InputError, match=r"all 3 examples are held out[^$]*fix: raise size"):
        Fixed.Config(size=3, validation_fraction=0.9999999).build().examples("train")
    with pytest.raises(ConfigError, match="size"):
        Fixed.Config(size=0)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ("x", r"Invalid: example 0: is a str\n    expected: an Example"),
        (Example(id="a", prompt=""), "the prompt is empty"),
        (Example(id="a", prompt=()), "is not a list of messages"),
        (Example(id="a", prompt=({"role": "usr", "content": "x"},)), r"has the role 'usr'[^$]*did you mean: user"),
        (Example(id="a", prompt="\ud800"), r"not valid Unicode\n    got: '\\ud800'"),
        (Example(id="a", prompt="x", answer=["\udfff"]), "not valid Unicode"),
        (Example(id="a", prompt="x", answer={1, 2}), r"cannot be written as JSON[^$]*got: \{1, 2\}"),
    ],
)
def test_invalid_examples_are_reported(example, message):
    class Invalid(Fixed):
        items = (example,)

    with pytest.raises(InputError, match=message):
        Invalid.Config(size=1).build().examples("train")


def test_prompts_become_conversations():
    config = ChatTask.Config(base=Sums.Config(), system="Be brief.", user="{prompt}\nUse <answer>.")
    task, base = config.build(seed=1), Sums.Config().build(seed=1)
    example, plain = task.examples("held_out")[2], base.examples("held_out")[2]
    system, user = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{plain.prompt}\nUse <answer>."},
    )
    assert example == attrs.evolve(plain, prompt=(system, user))
    assert len(task.examples("train")) == len(base.examples("train"))
    assert task.describe() != base.describe()


def test_conversations_keep_their_system_message():
    class Chats(Fixed):
        items = (
            Example(id="a", prompt=({"role": "system", "content": "a"}, {"role": "user", "content": "b"})),
            Example(id="b", prompt=({"role": "user", "content": "b"},)),
        )

    task = ChatTask.Config(base=Chats.Config(size=2, validation_fraction=0.0), system="c").build()
    assert [e.prompt[0]["content"] for e in task.examples("train")] == ["a", "c"]
    assert [len(e.prompt) for e in task.examples("train")] == [2, 2]


def test_the_user_message_contains_the_prompt():
    from axlearn_core.config import check

    with pytest.raises(ConfigError, match=r"user: does not contain the prompt"):
        check(ChatTask.Config(base=Sums.Config(), user="Answer."))


def test_prompts_are_encoded_for_the_model():
    text = TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
    assert encode_prompt(text, Example(id="a", prompt="2 + 2")) == text.encode_prompt("2 + 2")
    chat = Example(id="a", prompt=({"role": "user", "content": "2 + 2"},))
    assert text.spell(encode_prompt(text, chat)) == "User:\n2 + 2\n\nAssistant:\n"


@pytest.mark.slow
class TestReasoningGym:
    def test_the_dataset_makes_and_scores_examples(self):
        config = ReasoningGymTask.Config(dataset="basic_arithmetic", size=50, options={"max_digits": 2})
        task = config.build(seed=5)
        for example in task.examples("train"):
            assert task.score(example, f"<think>...</think> <answer> {example.answer}</answer>") == 1.0
            assert task.score(example, example.answer) == 1.0
            assert task.score(example, f"{example.answer}1") < 1.0
        assert [*task.examples("held_out")] == [*config.build(seed=5).examples("held_out")]
        assert task.describe() != config.build(seed=6).describe()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dataset": "basic_aritmetic"}, "did you mean: basic_arithmetic"),
            (
                {"dataset": "gcd", "options": {"max_digit": 3}},
                r"options.max_digit: is not an option of the dataset gcd",
            ),
            ({"dataset": "basic_arithmetic", "options": {"max_digits": -3}}, r"rejects its options[^$]*max_digits=-3"),
        ],
    )
    def test_invalid_datasets_are_reported(self, options, message):
        with pytest.raises(RequestError, match=message):
            ReasoningGymTask.Config(**options).build()
