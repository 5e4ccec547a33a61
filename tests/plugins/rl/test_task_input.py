import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_rl.task_input import TaskInput
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.rollout_groups import Sums


def config(**options):
    task = {"task": Sums.Config(), "tokenizer": ByteTokenizer.Config(), "sequence_length": 8, "batch_size": 4}
    return TaskInput.Config(**{**task, **options})


def draws(stream, count):
    return [(d.position, d.example.id) for d in stream.draw(count)]


def test_an_epoch_has_every_example_once_in_another_order():
    stream = config().build(seed=3).train()
    first, second = draws(stream, 10), draws(stream, 10)
    assert sorted(i for _, i in first) == sorted(i for _, i in second) == sorted(map(str, range(10)))
    assert [i for _, i in first] != [i for _, i in second]
    assert [p for p, _ in first + second] == [*range(20)]


def test_a_position_restores_the_stream():
    stream = config().build(seed=3).train()
    stream.draw(7)
    state, expected = stream.get_state(), draws(stream, 9)
    other = config().build(seed=3).train()
    other.set_state(state)
    assert draws(other, 9) == expected


def test_the_order_depends_on_the_seed_unless_it_is_not_shuffled():
    one, other = (draws(config().build(seed=seed).train(), 10) for seed in (0, 1))
    assert one != other
    assert [i for _, i in draws(config(shuffle=False).build(seed=5).train(), 10)] == [*map(str, range(10))]


def test_a_task_without_examples_is_an_error():
    with pytest.raises(
        InputError, match=r"input.task has no train examples(?s:.*)got: a Sums(?s:.*)fix: change input.task"
    ):
        config(task=Sums.Config(size=0)).build()


def test_a_task_without_held_out_examples_can_train():
    source = config(task=Sums.Config(held_out=0)).build()
    assert len(source.examples("train")) == 10
    with pytest.raises(InputError, match=r"no held-out examples(?s:.*)evaluators=\{\}"):
        source.examples("held_out")


def test_processes_share_each_batch_in_order():
    streams = [config().build(seed=3, process_index=i, process_count=2).train() for i in range(2)]
    whole = config().build(seed=3).train()
    for _ in range(3):
        parts = [next(stream)["examples"].tolist() for stream in streams]
        assert [len(part) for part in parts] == [2, 2]
        assert parts[0] + parts[1] == next(whole)["examples"].tolist()
    assert [stream.get_state() for stream in streams] == [whole.get_state()] * 2


@pytest.mark.parametrize(
    ("options", "path", "fix"),
    [({}, "batch_size", "set input.batch_size to 6"), ({"batch_size": 3, "rows": 25}, "rows", "set input.rows to 27")],
)
def test_a_batch_that_processes_cannot_share_is_an_error(options, path, fix):
    with pytest.raises(ConfigError, match=rf"input.{path}(?s:.*)cannot be split evenly over 3 processes(?s:.*){fix}"):
        config(**options).build(process_index=0, process_count=3)


def test_held_out_batches_do_not_exist():
    with pytest.raises(InputError, match="reward-evaluator"):
        config().build().evaluation()


def test_fewer_rows_than_rollouts_are_refused():
    with pytest.raises(ConfigError, match=r"rows: a batch has more rollouts than rows(?s:.*)group_size = 32"):
        check(config(rows=31))


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="vocab"):
        config().build(vocab_size=100)


def test_the_facts_name_the_task_and_the_tokenizer():
    assert config().build().describe() == {
        "size": 10,
        "examples": {"train": 10, "held_out": 2},
        "tokenizer": "utf-8 bytes",
    }
