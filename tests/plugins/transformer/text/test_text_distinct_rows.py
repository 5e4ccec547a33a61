"""The rows of a batch are different for data of any size. Shortages are reported."""

import json
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text import (
    ByteTokenizer,
    ChatFiles,
    ChatInput,
    Document,
    Files,
    LanguageModelInput,
    Mixture,
)
from axlearn_plugins_transformer.text.cycle import Cycle, Permutations
from axlearn_plugins_transformer.text.data_files import list_files
from axlearn_plugins_transformer.text.language_model import stack_rows
from axlearn_plugins_transformer.text.pipeline import Order, rotate_documents, training_rows_of_order_1
from axlearn_plugins_transformer.text.records import FileRecords
from axlearn_plugins_transformer.text.row_layout import ConcatLayout, PackedLayout, split_rows
from axlearn_plugins_transformer.text.shares import Shares
from axlearn_plugins_transformer.text.small_data import is_small
from support.text_inputs import config, equal, take, through_json

PACKINGS = ("concat", "first-fit", "none")


def write_documents(folder, count, words=30):
    """Write documents without repeated substrings, and return the number of tokens of each."""
    rng = random.Random(count)
    texts = [" ".join(f"{rng.randrange(10**6):06d}" for _ in range(rng.randint(1, words))) for _ in range(count)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return [len(t) + 1 for t in texts]


def text_input(folder, pattern="*.jsonl", **settings):
    source = settings.pop("source", None) or Files.Config(paths=str(folder / pattern))
    base = {"batch_size": 8, "sequence_length": 64, "source": source, "tokenizer": ByteTokenizer.Config()}
    return LanguageModelInput.Config(**{**base, **settings})


def distinct(cfg, batches, seed=1):
    """Return the minimum number of different rows in the first batches."""
    iterator = cfg.build(seed=seed).train()
    counts = [len({row.tobytes() for row in next(iterator)["tokens"]}) for _ in range(batches)]
    iterator.close()
    return min(counts)


@pytest.mark.slow_cases(
    "1-False-concat",
    "1-True-concat",
    "1-True-first-fit",
    "1-True-none",
    "3-False-concat",
    "3-True-concat",
    "700-False-concat",
    "700-False-first-fit",
    "700-False-none",
    "700-True-concat",
    "700-True-first-fit",
    "700-True-none",
)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 3, 10, 60, 700])
def test_rows_are_as_different_as_the_documents_allow(count, shuffle, packing, tmp_path):
    lengths = write_documents(tmp_path, count)
    for batch_size, sequence_length in ((8, 64), (64, 100), (128, 400)):
        pieces = sum(-(-n // sequence_length) for n in lengths)
        most = sum(lengths) // sequence_length if packing == "concat" else pieces
        cfg = text_input(
            tmp_path, batch_size=batch_size, sequence_length=sequence_length, packing=packing, shuffle=shuffle
        )
        assert distinct(cfg, 6) >= min(batch_size, most), (batch_size, sequence_length)


@pytest.mark.fast_cases("small-False-concat", "small-False-first-fit", "small-False-none", "small-True-concat")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("line_ends", [True, False])
def test_one_long_document_fills_a_batch_with_different_rows(packing, line_ends, tmp_path, either_size):
    words = random.Random(0).choices(range(10**6), k=(1 << 20) // 7)
    (tmp_path / "long.txt").write_text(("\n" if line_ends else " ").join(f"{w:06d}" for w in words))
    cfg = text_input(tmp_path, "long.txt", batch_size=128, sequence_length=256, packing=packing)
    assert distinct(cfg, 4) == 128


@pytest.mark.parametrize("packing", PACKINGS)
def test_shards_that_read_one_record_read_it_in_orders_of_their_own(packing, tmp_path, as_large):
    write_documents(tmp_path, 60)
    assert distinct(text_input(tmp_path, packing=packing), 5) == 8


@pytest.mark.fast_cases("20-concat", "20-first-fit", "20-none", "3-concat")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_chunks_in_which_no_line_begins_repeat_no_rows(count, packing, tmp_path, as_large):
    rng = random.Random(count)
    words = 3 * (1 << 17) // 7 // count
    texts = [" ".join(f"{rng.randrange(10**6):06d}" for _ in range(words)) for _ in range(count)]
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    cfg = text_input(tmp_path, batch_size=32, packing=packing)
    records = cfg.source.build().parts("train")[0].records
    assert isinstance(records, FileRecords)
    assert len(records) > count
    assert [len(documents) for documents in records.with_lines()] == [1] * count
    assert distinct(cfg, 4) == 32


@pytest.mark.parametrize("packing", ["first-fit", "none"])
def test_conversations_that_are_dropped_repeat_no_others(packing, tmp_path, as_large):
    rows = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}" * (1 if i % 8 == 0 else 99)}]
        for i in range(200)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
    cfg = ChatInput.Config(
        batch_size=16,
        sequence_length=64,
        source=ChatFiles.Config(paths=str(tmp_path / "chat.jsonl")),
        tokenizer=ByteTokenizer.Config(),
        packing=packing,
        too_long="drop",
    )
    assert distinct(cfg, 6) == 16


def test_conversations_of_a_batch_are_different(tmp_path, either_size):
    rows = [
        [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1} is the answer."}]
        for i in range(20)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
    for packing in PACKINGS:
        cfg = ChatInput.Config(
            batch_size=16,
            sequence_length=128,
            source=ChatFiles.Config(paths=str(tmp_path / "chat.jsonl")),
            tokenizer=ByteTokenizer.Config(),
            packing=packing,
        )
        assert distinct(cfg, 6) == 16


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_and_processes_share_one_order(workers, tmp_path, either_size):
    write_documents(tmp_path, 60)
    whole = text_input(tmp_path).build(seed=1).train()
    parts = [
        text_input(tmp_path, workers=workers).build(seed=1, process_index=i, process_count=2).train() for i in (0, 1)
    ]
    for _ in range(4):
        expected, shares = next(whole), [next(p) for p in parts]
        assert equal([expected], [{k: np.concatenate([s[k] for s in shares]) for k in expected}])
        assert len({row.tobytes() for row in expected["tokens"]}) == 8
    for iterator in (whole, *parts):
        iterator.close()


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_of_small_data_has_every_token_once(packing, tmp_path):
    lengths = write_documents(tmp_path, 60)
    total = sum(lengths)
    iterator = text_input(tmp_path, packing=packing, batch_size=4, num_shards=4).build().train()
    epoch_targets, first, epochs = [], None, 0
    while epochs < 3:
        batch = next(iterator)
        for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
            epoch_targets += targets[weights > 0].tolist()
            if packing != "concat" and len(epoch_targets) >= total:  # rows with whole pieces end with the epoch
                assert len(epoch_targets) == total
                assert first is None or sorted(epoch_targets) == sorted(first)
                assert epoch_targets != first
                epoch_targets, first, epochs = [], epoch_targets, epochs + 1
        if packing == "concat" and len(epoch_targets) >= 3 * total:
            counts = np.bincount(epoch_targets)
            assert abs(counts[256] / 3 - 60) <= 4  # document ends per epoch, except in rows between epochs
            epochs = 3
    iterator.close()


def test_fewer_rows_than_a_batch_are_counted(tmp_path, capfd):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(5)))
    iterator = text_input(tmp_path, packing="none").build().train()
    assert len({row.tobytes() for row in next(iterator)["tokens"]}) == 5
    iterator.close()
    assert (
        "gives 5 rows (55 tokens) per epoch, but a batch needs 8, so every batch repeats rows" in capfd.readouterr().err
    )
    iterator = text_input(tmp_path, packing="none", batch_size=5).build().train()
    next(iterator)
    iterator.close()
    assert "a batch needs" not in capfd.readouterr().err
    iterator = text_input(tmp_path, batch_size=2, sequence_length=100).build().train()
    next(iterator)
    iterator.close()
    note = (
        "few.jsonl has 55 tokens, but a row needs 100, so every row repeats tokens\n    fix: add data, or set input.seq"
    )
    assert note in capfd.readouterr().err


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 1, "b": 7}])
@pytest.mark.parametrize("batch_size", [4, 8, 12])
def test_every_batch_has_the_share_of_every_source(batch_size, weights, tmp_path, either_size):
    """If shards were at the same place of a pattern, whole batches would come from one source."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * n}) + "\n" for n in range(1, 300)))
    sources = {x: Files.Config(paths=str(tmp_path / f"{x}.jsonl")) for x in "ab"}
    cfg = text_input(tmp_path, source=Mixture.Config(sources=sources, weights=weights), batch_size=batch_size)
    iterator = cfg.build().train()
    for batch in take(iterator, 20):
        rows = sum((batch["targets"] == ord("a")).any(axis=1))
        assert abs(rows - batch_size * weights["a"] / sum(weights.values())) <= 1
    iterator.close()


def test_a_small_source_of_a_mixture_gives_different_rows(tmp_path):
    write_documents(tmp_path, 60)
    (tmp_path / "other.txt").write_text("".join(f"{i:06d}\n" for i in range(10**5)))
    sources = {
        "few": Files.Config(paths=str(tmp_path / "*.jsonl")),
        "many": Files.Config(paths=str(tmp_path / "*.txt")),
    }
    source = Mixture.Config(sources=sources, weights={"few": 1, "many": 1})
    cfg = text_input(tmp_path, source=source, batch_size=64, sequence_length=256, packing="none")
    assert distinct(cfg, 10) == 64


@pytest.mark.parametrize("proportions", [(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (0.01, 0.99)])
@pytest.mark.parametrize("num_shards", [1, 4, 101])
def test_shares_number_the_rows_of_each_part(proportions, num_shards):
    shares = Shares.from_weights(proportions, num_shards)
    numbers = [[] for _ in proportions]
    for turn in range(600 // num_shards):
        entries = [shares.row(turn, shard) for shard in range(num_shards)]
        for part in range(len(proportions)):
            own = [number for p, number in entries if p == part]
            assert len(own) <= shares.most(part, num_shards)
            numbers[part] += sorted(own)
    assert all(n == list(range(len(n))) for n in numbers)
    lone = {shares.row(turn, 0)[0] for turn in range(2000)}
    assert lone == set(range(len(proportions)))  # no shard reads only one part


@pytest.mark.parametrize("window", [1, 2, 7, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 31, 33, 63, 64, 200])
def test_neighbours_of_a_cycle_are_different(count, window):
    cycle = Cycle(count, window, 3, Permutations(count, 3))
    numbers = [cycle(i) for i in range(8 * count)]
    epochs = [numbers[i : i + count] for i in range(0, len(numbers), count)]
    assert all(sorted(e) == list(range(count)) for e in epochs)
    width = min(window, count)
    assert all(len(set(numbers[i : i + width])) == width for i in range(len(numbers) - width))
    if count > window + 1 and count > 6:
        assert len({tuple(e) for e in epochs}) > 1
    if count > 6:  # smaller counts have few permutations
        assert numbers != [Cycle(count, window, 4, Permutations(count, 4))(i) for i in range(8 * count)]
    assert [Cycle(count, window, 3, None)(i) for i in range(2 * count)] == 2 * list(range(count))


@pytest.mark.slow
def test_shards_never_read_one_record_at_the_same_time(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 9000)
    for chunk in (1000, 250, 90):  # as many records as shards plus one, some more, many more
        records = FileRecords.from_files(list_files([str(tmp_path / "a.txt")]), chunk_bytes=chunk)
        reads = [Order(7, True, 8).reads(records, 0, shard) for shard in range(8)]
        for index in range(100):
            assert len({r.name(index) for r in reads}) == 8


def test_the_readers_of_a_record_begin_at_different_places():
    documents = [Document(f"{i}") for i in range(9)]
    for place in range(3):
        assert [d.text for d in rotate_documents(documents, place, 3)] == [str((i + 3 * place) % 9) for i in range(9)]
    (long,) = [Document("abcdefghi", ends=True)]
    assert [(d.text, d.ends) for d in rotate_documents([long], 1, 3)] == [("defghi", True), ("abc", False)]
    assert rotate_documents([long], 0, 3) == [long]
    pair = [Document("ab"), Document("cdefghij")]
    assert "".join(d.text for d in rotate_documents(pair, 2, 4)) == "fghijabcde"
    assert rotate_documents([], 1, 2) == []


def test_rows_are_less_full_rather_than_repeated():
    rows = [[(0, 0, 1), (1, 0, 1), (2, 0, 1)], [(3, 0, 1), (4, 0, 1)]]
    assert len(split_rows(rows, 2)) == 2
    assert sorted(map(len, split_rows(rows, 4))) == [1, 1, 1, 2]
    assert sorted(p for row in split_rows(rows, 99) for p in row) == sorted(p for row in rows for p in row)
    assert len(split_rows(rows, 99)) == 5


@pytest.mark.parametrize("lengths", [[64] * 9, [1] * 9, [640], [7, 130, 64, 1, 200]])
@pytest.mark.parametrize("window", [1, 4, 8, 64])
def test_layouts_of_even_lengths_have_different_neighbours(lengths, window):
    """Cuts at the same places in every epoch are the hardest case."""
    joined = ConcatLayout(np.array(lengths), 64, window, 0, True)
    packed = PackedLayout(np.array(lengths), 64, window, 0, True, single=False)
    for layout, most in ((joined, sum(lengths) // 64), (packed, sum(-(-n // 64) for n in lengths))):
        rows = [tuple(layout.row(i)) for i in range(50 * window)]
        batches = [set(rows[i : i + window]) for i in range(0, len(rows), window)]
        assert min(map(len, batches)) >= min(window, most)
        assert all(sum(b - a for _, a, b in row) <= 64 for row in rows)


def test_every_epoch_of_a_layout_has_an_order_of_its_own():
    lengths = np.array([64] * 40)  # the cuts are equal in every epoch
    for layout in (ConcatLayout(lengths, 64, 4, 0, True), PackedLayout(lengths, 64, 4, 0, True, single=True)):
        rows = [tuple(layout.row(i)) for i in range(120)]
        epochs = [rows[:40], rows[40:80], rows[80:]]
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_that_take_all_of_the_data_have_orders_of_their_own():
    for batches, orders in ((True, 4), (False, 1)):
        packed = PackedLayout(np.array([9] * 8), 9, 8, 0, True, single=True, batches=batches)
        rows = [tuple(packed.row(i)) for i in range(32)]
        whole = [tuple(rows[i : i + 8]) for i in range(0, 32, 8)]
        assert all(len(set(batch)) == 8 for batch in whole)
        assert len(set(whole)) == orders


def test_what_is_small_is_small_before_compression(tmp_path):
    lines = [f'{{"text": "{"x" * 990}"}}\n'] * 1000
    (tmp_path / "a.jsonl").write_text("".join(lines))
    table = pyarrow.table({"text": [f"{i}" * 500 for i in range(2000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", row_group_size=100)
    for name, size in (("a.jsonl", 1000 * len(lines[0])), ("a.parquet", 3_000_000)):
        records = FileRecords.from_files(list_files([str(tmp_path / name)]))
        assert records.num_bytes >= size
        assert is_small(records, 1)
        half = FileRecords.from_files(list_files([str(tmp_path / name)]), keep=lambda file, part: part % 2 == 0)
        assert half.num_bytes < 0.6 * records.num_bytes
    assert not is_small([], 1)  # pyright: ignore[reportArgumentType]  # a list does not have `num_bytes`


def test_small_follows_the_size_of_a_batch():
    class Sized(list):
        num_bytes = 20 << 20

    assert not is_small(Sized(), 8 * 256)
    assert is_small(Sized(), 512 * 1024)
    Sized.num_bytes = 40 << 20
    assert not is_small(Sized(), 512 * 1024)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_of_an_older_version_keeps_its_order(workers, mixed, tmp_path, capfd, either_size):
    write_documents(tmp_path, 60)
    files = Files.Config(paths=str(tmp_path / "*.jsonl"), chunk_bytes=500)
    source = Mixture.Config(sources={"a": files, "b": files}, weights={"a": 1, "b": 3}) if mixed else files
    cfg = text_input(tmp_path, source=source, num_shards=4, batch_size=4)
    instance = cfg.build(seed=1)
    parts, order = instance.source.parts("train"), instance.order
    rows = [
        iter(training_rows_of_order_1(parts, instance.examples, instance.packing, order, shard)) for shard in range(4)
    ]
    old = [stack_rows([next(r) for r in rows]) for _ in range(3)]
    state = through_json({"batches": 3, "shards": {str(i): r.get_state() for i, r in enumerate(rows)}})
    old += [stack_rows([next(r) for r in rows]) for _ in range(5)]
    iterator = text_input(tmp_path, source=source, num_shards=4, batch_size=4, workers=workers).build(seed=1).train()
    new_state = through_json(iterator.get_state())
    new = take(iterator, 3)
    assert not equal(new, old[:3])
    iterator.set_state(state)
    assert equal(take(iterator, 3), old[3:6])
    assert "continues in the data order of the older version" in capfd.readouterr().err
    assert len(iterator.describe_position().facts()["records"]) == 4
    iterator.set_state(through_json(iterator.get_state()))
    assert equal(take(iterator, 2), old[6:])
    iterator.set_state(new_state)
    assert equal(take(iterator, 3), new)
    iterator.close()


def test_a_position_in_data_of_another_size_is_refused(corpus, monkeypatch):
    iterator = config(corpus).build().train()
    next(iterator)
    state = through_json(iterator.get_state())
    iterator.close()
    monkeypatch.setattr("axlearn_plugins_transformer.text.small_data.LARGE_BYTES", 0)
    iterator = config(corpus).build().train()
    with pytest.raises(
        InputError, match=r"got: a position in rows \(of small data\)\n    expected: a position in records"
    ):
        iterator.set_state(state)
    iterator.close()
