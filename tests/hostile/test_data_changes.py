"""Data that changes: between a stop and its continuation, and while it is read."""

import collections
import itertools
import os

import pytest

from axlearn_core.errors import CheckpointError, InputError
from axlearn_core.run.record import RunDir
from axlearn_core.train.data_facts import check_facts, plain_facts
from axlearn_plugins_transformer.text.language_model import LanguageModelInput
from axlearn_plugins_transformer.text.sources import Files
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

TEXT = "".join(f"line {i} of some text\n" for i in range(4000))

CHANGES = {
    "same size": lambda file: file.write_text(TEXT.swapcase()),
    "one byte": lambda file: file.write_text(TEXT[:500] + "#" + TEXT[501:]),
    "appended": lambda file: file.write_text(TEXT + "more\n"),
    "truncated": lambda file: file.write_text(TEXT[:20_000]),
    "empty": lambda file: file.write_text(""),
    "gone": lambda file: file.unlink(),
    "one more": lambda file: file.with_name("other.txt").write_text(TEXT),
    "renamed": lambda file: file.rename(file.with_name("renamed.txt")),
}


def reader(folder, pattern="*.txt", **fields):
    source = Files.Config(paths=str(folder / pattern))
    return LanguageModelInput.Config(
        batch_size=2, sequence_length=16, source=source, tokenizer=ByteTokenizer.Config(), **fields
    ).build()


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_noticed(change, tmp_path):
    file = tmp_path / "data.txt"
    file.write_text(TEXT)
    before = plain_facts(reader(tmp_path).describe())
    assert check_facts(tmp_path, before, plain_facts(reader(tmp_path).describe()), allow_drift=False) == []
    CHANGES[change](file)
    with pytest.raises((CheckpointError, InputError), match=r"data\.|is empty|no data file") as caught:
        check_facts(tmp_path, before, plain_facts(reader(tmp_path).describe()), allow_drift=False)
    assert caught.value.exit_code == 2
    if change not in ("empty", "gone"):
        assert "--allow-drift" in str(caught.value)
        assert check_facts(tmp_path, before, plain_facts(reader(tmp_path).describe()), allow_drift=True)


def test_a_large_file_is_compared_by_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("axlearn_plugins_transformer.text.fingerprint.BLOCKS", 4)
    file = tmp_path / "data.txt"
    file.write_bytes(b"x" * (1 << 20))
    before = plain_facts(reader(tmp_path).describe())
    for at in (0, (1 << 20) - 1):
        data = bytearray(b"x" * (1 << 20))
        data[at] = ord("y")
        file.write_bytes(bytes(data))
        assert plain_facts(reader(tmp_path).describe())["content"] != before["content"]


def test_a_touched_file_is_the_same(tmp_path):
    file = tmp_path / "data.txt"
    file.write_text(TEXT)
    batches = reader(tmp_path, prefetch=1).train()
    next(batches)
    os.utime(file, (0, 0))
    for _ in range(40):
        next(batches)
    batches.close()


@pytest.mark.slow_cases("truncated")
@pytest.mark.parametrize("change", ["same size", "truncated", "gone"])
def test_a_change_while_it_is_read_is_noticed(change, tmp_path):
    file = tmp_path / "data.txt"
    file.write_text(TEXT)
    batches = reader(tmp_path, prefetch=1).train()
    next(batches)
    CHANGES[change](file)
    with pytest.raises(InputError, match=r"data\.txt changed while it was in use|cannot read the data file"):
        collections.deque(itertools.islice(batches, 20_000), maxlen=1)
    batches.close()


def test_a_new_run_directory_knows_nothing_of_drift(tmp_path):
    assert not RunDir(tmp_path, resumes=False).allow_drift


def test_a_huge_line_is_refused_before_it_is_in_memory(tmp_path):
    file = tmp_path / "data.jsonl"
    with file.open("w") as handle:
        handle.write('{"text": "short"}\n{"text": "')
        for _ in range(50):
            handle.write("long " * 200_000)
        handle.write('"}\n')
    result = reader(tmp_path, "*.jsonl")
    with pytest.raises(
        InputError, match=r"data\.jsonl: the line .* is longer than 16,777,216 bytes[\s\S]*max_line_bytes"
    ):
        result.train()


def test_a_huge_text_of_parquet_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.table({"text": ["short", "long " * 10_000_000]})
    pyarrow.parquet.write_table(texts, tmp_path / "data.parquet", compression="zstd")
    assert (tmp_path / "data.parquet").stat().st_size < 20_000
    result = reader(tmp_path, "*.parquet")
    with pytest.raises(InputError, match=r"a text of row group 0 has 50,000,000 bytes[\s\S]*max_line_bytes"):
        result.train()


def test_deep_json_is_one_error(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    result = reader(tmp_path, "*.jsonl")
    with pytest.raises(InputError, match=r"data\.jsonl: the line at byte 0 (is nested too deeply|has no text)"):
        result.train()


def test_a_number_of_thousands_of_digits_is_one_error(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a", "id": ' + "9" * 5000 + "}\n")
    result = reader(tmp_path, "*.jsonl")
    with pytest.raises(InputError, match=r"data\.jsonl: the line at byte 0 has a number that is too long"):
        result.train()


def test_a_field_of_another_type_is_one_error(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": 7}\n')
    result = reader(tmp_path, "*.jsonl")
    with pytest.raises(InputError, match=r"has no text in the field 'text'\n    got: int\n    expected: a string$"):
        result.train()
