"""Rows of `labelled-input` have the answer of another row, and their labels."""

import json

import numpy as np
import pytest

from axlearn_core.config import check, patch
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_finetune.objectives.labelled_input import LabelledInput
from axlearn_plugins_finetune.objectives.preferences import LabelledFiles, PreferenceFiles
from axlearn_plugins_transformer.text import ByteTokenizer


def config(folder, rows, batch_size=4, kind=LabelledFiles, **settings):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = kind.Config(paths=str(folder / "rows.jsonl"))
    tokenizer = ByteTokenizer.Config()
    options = {"sequence_length": 24, "shuffle": False, **settings}
    return LabelledInput.Config(batch_size=batch_size, source=source, tokenizer=tokenizer, **options)


def rows(count):
    return [{"prompt": f"{i}?", "completion": f" {i}{i}.", "label": i % 3 == 0} for i in range(count)]


def texts(batch, answer):
    """Return the prompt and the answer of each row."""
    pairs = []
    for targets, weights in zip(batch[f"{answer}_targets"], batch[f"{answer}_weights"], strict=True):
        counted = np.flatnonzero(weights)
        ends = targets[: counted[0]], targets[counted]
        pairs.append(tuple(bytes(x[x < 256].astype(np.uint8)).decode() for x in ends))
    return pairs


def test_each_prompt_also_has_the_answer_of_the_next_row(tmp_path):
    batch = next(config(tmp_path, rows(8)).build().train())
    assert texts(batch, "completion") == [(f"{i}?", f" {i}{i}.") for i in range(4)]
    assert texts(batch, "mismatched") == [(f"{i}?", f" {j}{j}.") for i, j in enumerate((1, 2, 3, 0))]
    assert batch["labels"].tolist() == [1, 0, 0, 1]


def test_processes_share_the_mismatched_answers(tmp_path):
    cfg = config(tmp_path, rows(8), shuffle=True)
    whole = cfg.build(seed=1).train()
    shares = [cfg.build(seed=1, process_index=i, process_count=2).train() for i in range(2)]
    for _ in range(3):
        batch, parts = next(whole), [next(share) for share in shares]
        for name, x in batch.items():
            np.testing.assert_array_equal(x, np.concatenate([part[name] for part in parts]), err_msg=name)


def test_the_last_batch_of_an_evaluation_uses_its_real_rows(tmp_path):
    cfg = config(tmp_path, rows(5))
    path = cfg.source.paths
    held_out = [*patch(cfg, {"source.validation_paths": path}).build().evaluation()]
    assert [batch["labels"].tolist() for batch in held_out] == [[1, 0, 0, 1], [0, 0, 0, 0]]
    last = held_out[1]
    assert texts({n: x[:1] for n, x in last.items()}, "completion") == [("4?", " 44.")]
    assert not last["mismatched_weights"].any()  # one row has no other row
    assert not last["completion_weights"][1:].any()


def test_a_mismatched_answer_loses_its_end(tmp_path):
    long = [
        {"prompt": "p" * 18, "completion": "ab", "label": True},
        {"prompt": "q", "completion": "c" * 12, "label": False},
    ]
    batch = next(config(tmp_path, long, batch_size=2).build().train())
    assert texts(batch, "mismatched") == [("p" * 18, "c" * 6), ("q", "ab")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "labl": True}, "line 1: has no field 'label'"),
        ({"prompt": "a", "completion": "b", "label": 1}, "line 1: label is a int"),
        ({"prompt": "a", "completion": "", "label": True}, "line 1: completion is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "line 1: has no field 'completion'"),
    ],
)
def test_rows_in_another_form_are_refused(row, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        config(tmp_path, [row]).build()
    assert "expected:" in str(caught.value)


def test_a_source_of_pairs_is_refused(tmp_path):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(ConfigError, match="expected: labelled-files"):
        config(tmp_path, pairs, kind=PreferenceFiles).build()


def test_batches_of_one_row_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 2"):
        check(config(tmp_path, rows(2), batch_size=1))
