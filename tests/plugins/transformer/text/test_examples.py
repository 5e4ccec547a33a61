"""Tokenizing the documents of a record together gives the same examples, errors and positions as one by one."""

import json

import attrs
import numpy as np
import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text import LanguageModelInput, TokenizerJson, language_model, pipeline, small_data
from axlearn_plugins_transformer.text.records import Document
from support.text_inputs import config, equal, take, through_json

TOGETHER = TokenizerJson.Config(builtin="python-2k")


def test_documents_are_tokenized_together_and_give_the_same_examples(corpus):
    text_input = config(corpus, tokenizer=TOGETHER).build()
    texts = ["x", "def f():\n    return 1\n" * 9, "", "y" * 40, "z"]
    together = [Document(text, ends=i != 3) for i, text in enumerate(texts)]
    sizes, start = [], 0
    while start < len(together):
        examples = text_input.examples(together, start, 60)
        for document, one in zip(together[start:], examples, strict=False):
            assert (one is None) == (text_input.example(document) is None)
            assert one is None or np.array_equal(one, text_input.example(document))
        sizes.append(len(examples))
        start += len(examples)
    assert sizes == [1, 1, 3]  # the second is longer than 60 characters, so it is tokenized alone


def test_a_record_that_is_read_again_is_not_tokenized_from_its_beginning():
    calls = []

    def encode(documents, start):
        calls.append(start)
        return [len(d.text) for d in documents[start : start + 2]]

    examples = pipeline.make_examples(encode, [Document("x" * i) for i in range(7)])
    assert len(examples) == 6  # the empty one is left out
    assert [examples[i] for i in (3, 4, 5)] == [4, 5, 6]
    assert calls == [3, 5]


def test_documents_before_one_that_is_no_text_are_read_first(corpus):
    text_input = config(corpus, tokenizer=TOGETHER).build()
    documents = [Document("one"), Document("two"), Document("thr\ud800ee"), Document("four")]
    assert len(text_input.examples(documents, characters=100)) == 2
    with pytest.raises(InputError, match=r"lone surrogate '\\ud800' at character 3"):
        text_input.examples(documents, 2, 100)
    assert len(text_input.examples(documents, 3, 100)) == 1


def test_an_example_of_a_subclass_is_made_one_by_one(corpus):
    class Longest(LanguageModelInput):
        """Leaves short documents out."""

        def example(self, document):
            return super().example(document) if len(document.text) > 3 else None

    cfg = config(corpus, tokenizer=TOGETHER)
    settings = {k: getattr(cfg, k) for k in ("batch_size", "sequence_length", "source", "tokenizer")}
    text_input = Longest.Config(**settings).build()
    documents = [Document("one"), Document("three")]
    assert text_input.examples(documents, 0, 100) == [None]
    assert len(text_input.examples(documents, 1, 100)) == 1


class OneByOne(LanguageModelInput):
    """An input that creates the same examples one by one, as any subclass does."""

    def example(self, document):
        return super().example(document)


@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_batches_positions_and_resuming_are_as_one_by_one(tmp_path, packing, monkeypatch):
    monkeypatch.setattr(language_model, "CHARACTERS", 500)
    lines = [json.dumps({"text": f"def f{i}():\n    return {i}\n" * (i % 5 + 1)}) for i in range(300)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.txt").write_text("held out")
    cfg = config(tmp_path, tokenizer=TOGETHER, packing=packing, chunk=1 << 20, batch_size=2, num_shards=2)
    alone = OneByOne.Config(**{f.name: getattr(cfg, f.name) for f in attrs.fields(type(cfg)) if f.init})
    iterator, other = cfg.build().train(), alone.build().train()
    assert equal(take(iterator, 11), take(other, 11))
    state, expected = through_json(iterator.get_state()), take(iterator, 5)
    assert state == through_json(other.get_state())
    again = cfg.build().train()
    again.set_state(state)
    assert equal(take(again, 5), expected)
    for stream in (iterator, other, again):
        stream.close()


@pytest.mark.parametrize(("size", "most"), [("small", 4000), ("large", 4000 / 8)])
def test_shards_share_what_is_tokenized_ahead(size, most, tmp_path, monkeypatch):
    if size == "large":
        monkeypatch.setattr(small_data, "LARGE_BYTES", 0)
    monkeypatch.setattr(language_model, "CHARACTERS", 4000)
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps({"text": f"line {i} " * 5}) for i in range(2000)))
    (tmp_path / "held.txt").write_text("held out")
    cfg = config(tmp_path, tokenizer=TOGETHER, chunk=1 << 20, prefetch=1)
    text_input, counts = cfg.build(), []
    text_input.tokenizer._tokenizer = Counting(text_input.tokenizer._tokenizer, counts)
    iterator = text_input.train()
    next(iterator)
    iterator.close()
    assert most / 2 < max(counts) <= most


class Counting:
    """A tokenizer that records the number of characters of each call."""

    def __init__(self, tokenizer, counts):
        self.tokenizer, self.counts = tokenizer, counts

    def encode_batch_fast(self, texts, **options):
        self.counts.append(sum(map(len, texts)))
        return self.tokenizer.encode_batch_fast(texts, **options)


class Lower(TokenizerJson):
    """A tokenizer that overrides `encode` but not `encode_batch`."""

    def encode(self, text):
        return super().encode(text.lower())


def test_a_tokenizer_with_an_encode_of_its_own_is_asked_one_by_one(corpus):
    text_input = config(corpus, tokenizer=TOGETHER).build()
    text_input.tokenizer = Lower(TOGETHER)
    examples = text_input.examples([Document("ABC"), Document("DEF")], 0, 100)
    assert len(examples) == 1
    assert np.array_equal(examples[0], text_input.example(Document("abc")))
