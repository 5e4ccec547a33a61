"""Token IDs and labels for which a model has no row."""

import jax
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose import compose
from axlearn_core.errors import InputError
from axlearn_core.run.record import RunDir
from axlearn_core.train.batch_ids import check_ids, count_rows
from axlearn_core.train.session import Session

ROWS = {"tokens": 8, "targets": 8, "labels": 3}


def text(**changes):
    rows = {name: np.arange(8, dtype=np.int32).reshape(2, 4) for name in ("tokens", "targets")}
    return {**rows, "weights": np.ones((2, 4), np.float32), "segment_ids": np.ones((2, 4), np.int32), **changes}


def with_id(value):
    ids = np.zeros((2, 4), np.int32)
    ids[1, 2] = value
    return ids


@pytest.mark.parametrize("value", [8, -1])
@pytest.mark.parametrize(("name", "mark"), [("tokens", "segment_ids"), ("targets", "weights")])
def test_an_id_without_a_row_is_named_with_its_place(name, mark, value):
    check_ids(text(), ROWS)
    batch = text(**{name: with_id(value)})
    with pytest.raises(
        InputError, match=rf"{name}\[1, 2\] of a batch: .*\n *got: {value}\n *expected: 0 to 7\n.*vocab_size"
    ):
        check_ids(batch, ROWS)
    marks = np.ones((2, 4), batch[mark].dtype)
    marks[1, 2] = 0
    check_ids({**batch, mark: marks}, ROWS)


def test_labels_of_classes_are_checked():
    check_ids({"labels": np.asarray([0, 2])}, ROWS)
    check_ids({"labels": np.asarray([0.5, 9.0])}, ROWS)  # shares of classes
    check_ids({"labels": np.asarray([0, 9]), "weights": np.asarray([1.0, 0.0])}, ROWS)
    with pytest.raises(
        InputError, match=r"labels\[1\] of a batch: .*\n *got: 3\n *expected: 0 to 2\n.*model\.num_classes"
    ):
        check_ids({"labels": np.asarray([0, 3])}, ROWS)


def test_arrays_on_devices_are_left_alone():
    check_ids({"tokens": jax.numpy.asarray([[9]])}, ROWS)


def test_sizes_come_from_the_model():
    programs = [
        compose(ax.resolve(name, target="none").config, jax.devices()[:1]) for name in ("quickstart", "vit-tiny")
    ]
    assert [count_rows(program) for program in programs] == [{"tokens": 2048, "targets": 2048}, {"labels": 4}]


def test_a_session_checks_the_batches_of_its_input(tmp_path):
    program = compose(ax.resolve("quickstart", target="none").config, jax.devices()[:1])
    session = Session(
        program=program, max_steps=1, log_every_steps=1, seed=0, input=None, evaluators={}, checkpointer=None,
        batches=iter([text(), text(tokens=with_id(2048))]), run_dir=RunDir(tmp_path, resumes=False),
    )  # fmt: skip
    np.testing.assert_array_equal(session.next_batch()["tokens"], text()["tokens"])
    with pytest.raises(InputError, match=r"tokens\[1, 2\] of a batch"):
        session.next_batch()
