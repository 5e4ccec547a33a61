"""The stream: contents of batches, independence of processes and workers, exact resume, and padded evaluation."""

import json
import pickle
import time

import numpy as np
import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_transformer.text import (
    ByteTokenizer,
    Files,
    LanguageModelInput,
    Mixture,
    StandardLibrary,
    TokenizerJson,
    example,
)
from support.text_inputs import config, equal, take, through_json

EOS = 256


def documents(cfg, split="train"):
    return [
        d.text for p in cfg.source.build().parts(split) for i in range(len(p.records)) for d in p.records[i] if d.text
    ]


@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
def test_rows_are_what_a_plain_packer_makes(corpus, packing, either_size):
    cfg = config(corpus, packing=packing, shuffle=False, batch_size=1, num_shards=1)
    pairs = []
    for text in documents(cfg):
        ids = [*text.encode(), EOS]
        pairs.append(list(zip([EOS, *ids[:-1]], ids, strict=True)))
    rows = brute_force(pairs * 2, 16, packing)
    with_stream = cfg.build().train()
    for batch, row in zip(take(with_stream, len(rows) // 2), rows, strict=False):
        got = {k: batch[k][0].tolist() for k in batch}
        assert got == row
    with_stream.close()


def brute_force(pairs, length, packing):
    """Compute rows as lists of (segment, position, input, target) by the rules of each packing."""
    rows, current = [], []

    def flush():
        nonlocal current
        if current:
            rows.append(current)
        current = []

    if packing == "concat":
        for document in pairs:
            rest = document
            while rest:
                room = length - sum(map(len, current))
                current.append(rest[:room])
                rest = rest[room:]
                if sum(map(len, current)) == length:
                    flush()
    else:
        pieces = [d[i : i + length] for d in pairs for i in range(0, len(d), length)]
        bins = [[] for _ in range(16)]
        for piece in pieces:
            for one in bins:
                if (not one or packing == "first-fit") and sum(map(len, one)) + len(piece) <= length:
                    one.append(piece)
                    break
            else:
                rows += bins
                bins = [[piece]] + [[] for _ in range(15)]
    batches = []
    for row in rows:
        flat = [(s, p, a, b) for s, piece in enumerate(row, 1) for p, (a, b) in enumerate(piece)]
        flat += [(0, 0, 0, 0)] * (length - len(flat))
        segments, positions, inputs, targets = (list(x) for x in zip(*flat, strict=True))
        weights = [1.0 if s else 0.0 for s in segments]
        batches.append(
            {"tokens": inputs, "targets": targets, "weights": weights, "segment_ids": segments, "positions": positions}
        )
    return batches


def test_an_epoch_has_every_document_once_and_epochs_differ(corpus, either_size):
    cfg = config(corpus, batch_size=1, num_shards=1, packing="none", sequence_length=128, chunk=1 << 20)
    expected = sorted(documents(cfg))
    with_stream = cfg.build(seed=5).train()
    rows = take(with_stream, 80)
    texts = [bytes(b["targets"][0][: int(b["weights"].sum()) - 1].tolist()).decode() for b in rows]
    assert sorted(texts[:40]) == sorted(texts[40:]) == expected
    assert texts[:40] != texts[40:]
    assert texts[:40] != expected
    with_stream.close()


@pytest.mark.slow_cases("large-2-first-fit", "large-4-first-fit", "large-8-concat", "large-8-first-fit")
@pytest.mark.parametrize("packing", ["concat", "first-fit"])
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_global_stream_is_the_same_for_any_number_of_processes(corpus, processes, packing, either_size):
    cfg = config(corpus, batch_size=16, packing=packing)
    whole = cfg.build(seed=1).train()
    parts = [cfg.build(seed=1, process_index=i, process_count=processes).train() for i in range(processes)]
    for _ in range(12):
        shares = [next(p) for p in parts]
        joined = {k: np.concatenate([s[k] for s in shares]) for k in shares[0]}
        assert equal([next(whole)], [joined])
    merged = {"batches": 12, "shards": {k: v for p in parts for k, v in p.get_state()["shards"].items()}}
    assert merged == whole.get_state()
    resumed = cfg.build(seed=1, process_index=0, process_count=2).train()
    resumed.set_state(through_json(merged))
    assert np.array_equal(next(resumed)["tokens"], next(whole)["tokens"][:8])
    for p in (whole, resumed, *parts):
        p.close()


def test_seeds_and_shuffling_change_the_order(corpus, either_size):
    def first(seed, **settings):
        iterator = config(corpus, **settings).build(seed=seed).train()
        batches = take(iterator, 4)
        iterator.close()
        return batches

    assert equal(first(1), first(1))
    assert not equal(first(1), first(2))
    assert not equal(first(1), first(1, shuffle=False))
    assert equal(first(1, shuffle=False), first(2, shuffle=False))
    assert equal(first(2**40 + 1), first(1))


@pytest.mark.fast_cases(
    "small-0-concat",
    "small-0-first-fit",
    "small-0-none",
    "small-1-concat",
    "small-1-first-fit",
    "small-1-none",
    "small-33-concat",
    "small-33-first-fit",
    "small-33-none",
    "small-7-concat",
    "small-7-first-fit",
    "small-7-none",
)
@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
@pytest.mark.parametrize("at", [0, 1, 7, 33])
def test_resume_is_exact_anywhere(corpus, packing, at, either_size):
    cfg = config(corpus, packing=packing)
    one, other = cfg.build(seed=3).train(), cfg.build(seed=3).train()
    take(one, at)
    state = through_json(one.get_state())
    expected = take(one, 25)
    take(other, 5)  # a running stream can also move to the position
    other.set_state(state)
    assert other.get_state() == one_state(state)
    assert equal(take(other, 25), expected)
    assert through_json(other.get_state()) == through_json(one.get_state())
    one.set_state(state)
    assert equal(take(one, 25), expected)
    one.close()
    other.close()


def one_state(state):
    from axlearn_plugins_transformer.text.batch_iterator import _restore_tuples

    return _restore_tuples(state)


def test_a_state_that_was_given_does_not_change_later(corpus, either_size):
    iterator = config(corpus).build().train()
    next(iterator)
    state = iterator.get_state()
    before = json.dumps(state)
    take(iterator, 10)
    assert json.dumps(state) == before
    iterator.close()


def test_a_state_of_other_shards_is_refused(corpus):
    state = config(corpus, num_shards=4).build().train().get_state()
    with pytest.raises(InputError, match="the saved data position has the shards 0, 1, 2, 3, but this process needs"):
        config(corpus).build().train().set_state(state)


@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
def test_evaluation_is_one_pass_in_order_padded_with_weight_zero(corpus, packing):
    cfg = config(corpus, packing=packing, batch_size=3, num_shards=3)
    instance = cfg.build(seed=1)
    batches = list(instance.evaluation())
    assert equal(batches, list(cfg.build(seed=2).evaluation()))
    assert all(b["tokens"].shape == (3, 16) for b in batches)
    flat = {k: np.concatenate([b[k].reshape(-1) for b in batches]) for k in batches[0]}
    inside = flat["segment_ids"] > 0
    text = "".join(documents(cfg, "validation")).encode()
    count = len(instance.source.parts("validation")[0].records)
    assert flat["bytes"].sum() == len(text)
    assert flat["weights"].sum() == inside.sum() == len(text) + 1  # all bytes and one end-of-document token
    assert bytes(t for t in flat["targets"][inside].tolist() if t != EOS) == text
    assert count > 1
    assert all((flat[k][~inside] == 0).all() for k in flat)
    assert flat["bytes"].dtype == flat["weights"].dtype == np.float32
    last = batches[-1]
    assert last["weights"].sum() < last["weights"].size


@pytest.mark.parametrize("processes", [2, 4])
def test_evaluation_is_the_same_for_any_number_of_processes(corpus, processes):
    cfg = config(corpus, batch_size=4, num_shards=4)
    whole = list(cfg.build().evaluation())
    shares = [list(cfg.build(process_index=i, process_count=processes).evaluation()) for i in range(processes)]
    joined = [{k: np.concatenate([s[k] for s in step]) for k in step[0]} for step in zip(*shares, strict=True)]
    assert equal(whole, joined)


def test_evaluation_resumes(corpus):
    instance = config(corpus, batch_size=2, num_shards=2).build()
    iterator = instance.evaluation()
    take(iterator, 4)
    state = through_json(iterator.get_state())
    rest = list(iterator)
    again = instance.evaluation()
    again.set_state(state)
    assert equal(list(again), rest)


def test_mixtures_share_the_rows_of_every_batch_by_weight(tmp_path, either_size):
    for letter, count in (("a", 50), ("b", 2000), ("c", 400)):
        (tmp_path / f"{letter}.txt").write_text(f"{letter * 9}\n" * count)
    sources = {x: Files.Config(paths=str(tmp_path / f"{x}.txt"), chunk_bytes=500) for x in "abc"}
    source = Mixture.Config(sources=sources, weights={"a": 0.5, "b": 0.125, "c": 0.375})
    cfg = LanguageModelInput.Config(batch_size=16, sequence_length=32, source=source, tokenizer=ByteTokenizer.Config())
    iterator = cfg.build().train()
    batches = take(iterator, 25)
    own = np.array([[sum((b["targets"] == ord(x)).any(axis=1)) for x in "abc"] for b in batches])
    assert (own.sum(axis=1) == 16).all()  # no row has text of two sources
    assert own.sum(axis=0) / own.sum() == pytest.approx([0.5, 0.125, 0.375], abs=0.02)
    assert (own[:, 0] >= 5).all()  # nor does a batch leave out a large source
    state = through_json(iterator.get_state())
    other = cfg.build().train()
    other.set_state(state)
    assert equal(take(other, 10), take(iterator, 10))
    actual = iterator.describe_position().facts()["records"]
    assert len(actual) == 16
    assert all(len(names) == 6 for names in actual.values())
    iterator.close()
    other.close()


def test_positions_name_the_records_that_a_batch_came_from(corpus, either_size):
    cfg = config(corpus, batch_size=2, num_shards=2, chunk=1 << 20)
    instance = cfg.build(seed=4)
    iterator = instance.train()
    (part,) = instance.source.parts("train")
    letters = {part.records.name(i): {d.text[0] for d in part.records[i]} for i in range(len(part.records))}
    for number in range(1, 30):
        batch = next(iterator)
        position = iterator.describe_position().facts()
        assert position["batch"] == number
        for shard, row in enumerate(batch["targets"]):
            if row[0] != EOS:
                first, following = position["records"][str(shard)]
                assert chr(row[0]) in letters[first] | letters[following]
    iterator.close()


def test_what_does_not_fit_together_is_refused(corpus):
    with pytest.raises(ConfigError, match="num_shards: does not divide the batch size 8"):
        check(config(corpus, num_shards=3))
    with pytest.raises(ConfigError, match="8 data shards cannot be split evenly over 3 processes"):
        config(corpus).build(process_count=3)
    with pytest.raises(ConfigError, match=r"model\.vocab_size: is 200, less than the 257 ids of input\.tokenizer"):
        config(corpus).build(vocab_size=200)
    only_train = config(corpus, source=Files.Config(paths=str(corpus / "*.jsonl"))).build()
    with pytest.raises(InputError, match=r"input.source has no validation data\n.*validation_paths"):
        only_train.evaluation()
    few = Files.Config(paths=str(corpus / "held.txt"), validation_fraction=0.001)
    with pytest.raises(
        InputError, match=r"got: validation_fraction 0.001, which selects no chunk[\s\S]*lower chunk_bytes"
    ):
        config(corpus, source=few).build().evaluation()
    only_held = config(corpus, source=Files.Config(validation_paths=str(corpus / "held.txt"))).build()
    with pytest.raises(InputError, match="no train data"):
        only_held.train()
    assert len(list(only_held.evaluation())) > 1


def test_configs_and_inputs_pickle(corpus):
    cfg = config(corpus, tokenizer=TokenizerJson.Config(builtin="python-2k"))
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    instance = pickle.loads(pickle.dumps(cfg.build(vocab_size=2048)))
    assert instance.tokenizer.decode(instance.tokenizer.encode("def f():")) == "def f():"


def test_a_subclass_weighs_targets(corpus):
    class Halves(LanguageModelInput):
        """Train only on the second half of each document."""

        def example(self, document):
            ids = self.tokenizer.encode(document.text)
            weights = [0.0 if i < len(ids) // 2 else 0.5 for i in range(len(ids))]
            return example([EOS, *ids[:-1]], ids, weights)

    cfg = config(corpus)
    result = Halves.Config(**{k: getattr(cfg, k) for k in ("batch_size", "sequence_length", "source", "tokenizer")})
    iterator = result.build().train()
    batch = next(iterator)
    assert set(np.unique(batch["weights"])) == {0.0, 0.5}
    iterator.close()


def test_the_lock_has_the_facts(corpus):
    facts = config(corpus).build().describe()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["files"] == 5
    assert facts["tokenizer"] == "utf-8 bytes"
    assert facts["num_shards"] == 8


def test_the_quickstart_input_starts_at_once():
    cfg = LanguageModelInput.Config(
        batch_size=8,
        sequence_length=256,
        source=StandardLibrary.Config(),
        tokenizer=TokenizerJson.Config(builtin="python-2k"),
    )
    start = time.perf_counter()
    instance = cfg.build(seed=0, vocab_size=2048)
    iterator = instance.train()
    batch = next(iterator)
    assert time.perf_counter() - start < 5
    assert instance.tokenizer.decode(batch["targets"][0].tolist()).isprintable() is False
    assert "self" in "".join(instance.tokenizer.decode(r.tolist()) for b in take(iterator, 5) for r in b["targets"])
    assert (batch["weights"] == 1).all()
    iterator.close()
    evaluation = instance.evaluation()
    first = next(evaluation)
    assert first["bytes"].sum() / first["weights"].sum() > 2
    evaluation.close()
