"""The file and the place in it of the documents in a batch."""

import json
import random

import numpy as np
import pytest

from axlearn_core.contracts.capabilities import LocatesDocuments
from axlearn_plugins_transformer.text.language_model import LanguageModelInput
from axlearn_plugins_transformer.text.sources import Files
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

SETTINGS = {"batch_size": 4, "sequence_length": 48, "tokenizer": ByteTokenizer.Config()}


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefgh \N{LATIN SMALL LETTER THORN}", k=draw.randint(9, 60))) for _ in range(90)]


def write(folder, kind, texts):
    file = folder / f"data.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    elif kind == "txt":
        file.write_text("\n".join(texts))
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
        parquet.write_table(
            pytest.importorskip("pyarrow", reason="needs pyarrow").table({"text": texts}), file, row_group_size=20
        )
    return file


def located(file, kind, source):
    """Return the bytes of the text that begins at a place."""
    name, _, place = source.partition(": ")
    assert name == str(file)
    number = int(place.rpartition(" ")[2])
    if kind == "jsonl":
        assert place.startswith("the line at byte ")
        return json.loads(file.read_bytes()[number:].partition(b"\n")[0])["text"].encode()
    assert kind == "txt"
    assert place.startswith("byte ")
    return file.read_bytes()[number:]


def pieces(batch):
    """Yield (row, start, stop, bytes without the end token) of each document."""
    for row, segments in enumerate(batch["segment_ids"]):
        for number in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == number)
            start, stop = int(places[0]), int(places[-1]) + 1
            ids = [i for i in batch["targets"][row, start:stop].tolist() if i < 256]
            yield row, start, stop, bytes(ids)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_pieces_are_found_in_their_files(kind, packing, large, texts, tmp_path, monkeypatch):
    if large:
        monkeypatch.setattr("axlearn_plugins_transformer.text.language_model.is_small", lambda *_: False)
    file = write(tmp_path, kind, texts)
    source = Files.Config(paths=str(file), chunk_bytes=300)
    batches = LanguageModelInput.Config(source=source, packing=packing, **SETTINGS).build().train()
    count = 0
    for _ in range(3):
        batch = next(batches)
        position = batches.describe_position()
        assert isinstance(position, LocatesDocuments)
        for row, start, stop, text in pieces(batch):
            if len(text) > 6:  # a shorter piece may be in several documents
                content = located(file, kind, position.locate(batch, row, start, stop))
                assert text in content if kind == "jsonl" else content.startswith(text)
                count += 1
    batches.close()
    assert count >= 9


def test_rows_of_parquet_are_named(texts, tmp_path):
    file = write(tmp_path, "parquet", texts)
    source = Files.Config(paths=str(file))
    batches = LanguageModelInput.Config(source=source, packing="none", **SETTINGS).build().train()
    batch = next(batches)
    for row, start, stop, text in pieces(batch):
        place = batches.describe_position().locate(batch, row, start, stop).partition(": ")[2]
        number, group = int(place.split()[1]), int(place.split()[-1])
        assert text in texts[20 * group + number].encode()
    batches.close()


def test_other_tokens_are_not_found(texts, tmp_path):
    source = Files.Config(paths=str(write(tmp_path, "jsonl", texts)))
    batches = LanguageModelInput.Config(source=source, **SETTINGS).build().train()
    batch = next(batches)
    other = {**batch, "targets": np.full_like(batch["targets"], 7)}
    assert batches.describe_position().locate(other, 0, 0, 9) == ""
    batches.close()
