"""The parts of a root config: those of a trainer, and None for what another node lacks."""

import inspect

import pytest

import axlearn_core as ax
from axlearn_core.config import Node, get_fields, get_options, node
from axlearn_core.contracts import experiment
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.capabilities import get_learning_rate
from axlearn_core.errors import StorageError, reason

READERS = {
    name: function
    for name, function in inspect.getmembers(experiment, inspect.isfunction)
    if function.__module__ == experiment.__name__
    and not name.startswith("_")
    and list(inspect.signature(function).parameters) == ["config"]
}
ABSENT = {
    "accumulate_steps": 1,
    "end_tokens": (),
    "is_pipelined": False,
    "offloads_optimizer": False,
    "get_evaluator_configs": {},
    "get_experiment_name": "",
    "get_tracker_configs": (),
}


@node
class Lonely(Node[None]):
    """The root of something else."""

    width: int = 3
    depth: int | None = None


@pytest.mark.parametrize("name", READERS)
def test_a_part_that_a_config_lacks_is_none(name):
    for config in (Lonely(), None, object()):
        assert READERS[name](config) == ABSENT.get(name)


@pytest.fixture(scope="module")
def quickstart():
    settings = ["learner.accumulate_steps=2", "checkpointer.uri=file:///elsewhere", "checkpointer.every_steps=7"]
    return ax.resolve("quickstart", set=settings).config


def test_the_parts_of_a_trainer(quickstart):
    fields = get_fields(quickstart)
    for name in ("model", "objective", "input", "learner", "loop", "checkpointer"):
        assert READERS[f"get_{name}_config"](quickstart) is fields[name]
    assert experiment.get_text_facts(quickstart) is fields["text"]
    assert experiment.get_tracker_configs(quickstart) is fields["trackers"]
    assert experiment.get_mesh(quickstart) is fields["mesh"]
    assert experiment.get_optimizer_config(quickstart) is fields["learner"].optimizer
    assert experiment.get_parameter_rules(quickstart) == fields["learner"].rules
    assert experiment.get_tokenizer_config(quickstart) is fields["input"].tokenizer
    assert experiment.build_tokenizer(quickstart).vocab_size > 1
    assert experiment.sequence_length(quickstart) == fields["input"].sequence_length
    assert experiment.batch_size(quickstart) == fields["input"].batch_size
    assert experiment.accumulate_steps(quickstart) == 2
    assert experiment.checkpoint_uri(quickstart) == "file:///elsewhere"
    assert experiment.save_interval(quickstart) == 7
    assert get_learning_rate(fields["learner"].optimizer) is not None


def test_fields_and_the_options_among_them():
    assert get_fields(Lonely()) == {"width": 3, "depth": None}
    assert get_options(Lonely()) == {"width": 3}
    assert get_options(Lonely(depth=2), "depth") == {"depth": 2}
    assert get_options(Lonely(), "depth") == {}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("odd"), "odd"),
        (StorageError("one\n    two"), "one"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_reason_of_an_error(error, expected):
    assert reason(error) == expected


def test_an_array_has_a_shape_and_a_dtype():
    import jax
    import numpy as np

    assert all(map(is_array, (np.zeros(2), np.float32(1), jax.ShapeDtypeStruct((2,), "float32"))))
    assert not any(map(is_array, (1.0, None, [1.0])))
    assert jax.eval_shape(lambda x: x if is_array(x) else None, np.zeros(3)) is not None
