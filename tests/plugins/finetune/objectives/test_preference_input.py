"""Pairs of a batch are distinct, independent of the number of processes, and compatible with older runs."""

import json

import numpy as np
import pytest

from axlearn_plugins_finetune.objectives.preference_input import PreferenceInput
from axlearn_plugins_finetune.objectives.preferences import PreferenceFiles
from axlearn_plugins_transformer.text import ByteTokenizer


def pairs(folder, count, batch_size=8, **offered):
    """Return the batches of an input with `count` pairs."""
    rows = [{"prompt": f"{i} + 1?", "chosen": f" {i + 1}", "rejected": " no"} for i in range(count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = PreferenceFiles.Config(paths=str(folder / "pairs.jsonl"))
    cfg = PreferenceInput.Config(
        batch_size=batch_size, sequence_length=32, source=source, tokenizer=ByteTokenizer.Config()
    )
    return cfg.build(seed=3, **offered).train()


def ids(batch):
    return [row.tobytes() for row in batch["chosen_tokens"]]


@pytest.mark.slow_cases("31", "60")
@pytest.mark.parametrize("count", [1, 5, 8, 9, 13, 31, 60])
def test_the_pairs_of_a_batch_are_different(count, tmp_path):
    batches = pairs(tmp_path, count)
    batch_ids = [ids(next(batches)) for _ in range(5 * count)]
    assert min(len(set(batch)) for batch in batch_ids) == min(8, count)
    flat = [pair for batch in batch_ids for pair in batch]
    for epoch in range(5):
        assert len(set(flat[epoch * count : (epoch + 1) * count])) == count
    if count > 9:
        assert flat[:count] != flat[count : 2 * count]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_one_order_of_pairs(processes, tmp_path):
    whole = pairs(tmp_path, 13)
    shares = [pairs(tmp_path, 13, process_index=i, process_count=processes) for i in range(processes)]
    for _ in range(6):
        assert ids(next(whole)) == [row for share in shares for row in ids(next(share))]


def test_fewer_pairs_than_a_batch_are_counted(tmp_path, capfd):
    pairs(tmp_path, 5)
    assert "has 5 pairs for batches of 8, so every batch repeats pairs" in capfd.readouterr().err
    pairs(tmp_path, 8)
    assert capfd.readouterr().err == ""


def test_a_run_of_an_older_version_keeps_its_order_of_pairs(tmp_path, capfd):
    batches = pairs(tmp_path, 13)
    everything = {row: i for i, row in enumerate(sorted(set(ids(next(pairs(tmp_path, 13, batch_size=13))))))}
    old = np.concatenate([np.random.default_rng((3, epoch)).permutation(13) for epoch in range(5)])
    batches.set_state({"batches": 2})
    assert "continues in the data order of the older version" in capfd.readouterr().err
    by_number = dict(zip(old[16:24], ids(next(batches)), strict=True))
    for batch in (3, 4):
        for i, row in zip(old[8 * batch : 8 * batch + 8], ids(next(batches)), strict=True):
            assert by_number.setdefault(i, row) == row
    assert len(set(by_number.values())) == len(by_number) <= len(everything)
    assert batches.get_state() == {"batches": 5}
    batches.set_state(pairs(tmp_path, 13).get_state())
    assert ids(next(batches)) == ids(next(pairs(tmp_path, 13)))


def test_exactly_the_answer_and_its_end_count(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "ab", "chosen": "cde", "rejected": "f"}) + "\n")
    source = PreferenceFiles.Config(paths=str(tmp_path / "pairs.jsonl"))
    cfg = PreferenceInput.Config(batch_size=1, sequence_length=8, source=source, tokenizer=ByteTokenizer.Config())
    batch = next(cfg.build().train())
    for answer, text in (("chosen", b"cde"), ("rejected", b"f")):
        targets, weights = batch[f"{answer}_targets"][0], batch[f"{answer}_weights"][0]
        assert targets[weights > 0].tolist() == [*text, 256]
        assert weights.tolist() == [0.0] * 2 + [1.0] * (len(text) + 1) + [0.0] * (5 - len(text))
