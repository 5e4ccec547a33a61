"""Documents of a record that are tokenized together: the same examples, errors and positions as one by one."""

import json

import numpy as np
import pytest
from text_streams import config, equal, take, through_json

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text import LanguageModelInput, TokenizerJson, language_model, pipeline
from axlearn_plugins_transformer.text.records import Document

TOGETHER = TokenizerJson.Config(builtin="python-2k")


def test_documents_are_tokenized_together_and_give_the_same_examples(corpus, monkeypatch):
    text_input = config(corpus, tokenizer=TOGETHER).build()
    texts = ["x", "def f():\n    return 1\n" * 9, "", "y" * 40, "z"]
    together = [Document(text, ends=i != 3) for i, text in enumerate(texts)]
    monkeypatch.setattr(language_model, "CHARACTERS", 60)
    sizes, start = [], 0
    while start < len(together):
        examples = text_input.examples(together, start)
        for document, one in zip(together[start:], examples, strict=False):
            assert (one is None) == (text_input.example(document) is None)
            assert one is None or np.array_equal(one, text_input.example(document))
        sizes.append(len(examples))
        start += len(examples)
    assert sizes == [1, 1, 3]  # the second is longer than 60 characters, and is taken all the same


def test_a_record_that_is_read_again_is_not_tokenized_from_its_beginning():
    calls = []

    def encode(documents, start):
        calls.append(start)
        return [len(d.text) for d in documents[start : start + 2]]

    examples = pipeline.examples_of(encode, [Document("x" * i) for i in range(7)])
    assert len(examples) == 6  # the empty one is left out
    assert [examples[i] for i in (3, 4, 5)] == [4, 5, 6]
    assert calls == [3, 5]


def test_documents_before_one_that_is_no_text_are_read_first(corpus):
    text_input = config(corpus, tokenizer=TOGETHER).build()
    documents = [Document("one"), Document("two"), Document("thr\ud800ee"), Document("four")]
    assert len(text_input.examples(documents)) == 2
    with pytest.raises(InputError, match=r"lone surrogate '\\ud800' at character 3"):
        text_input.examples(documents, 2)
    assert len(text_input.examples(documents, 3)) == 1


def test_an_example_of_a_subclass_is_made_one_by_one(corpus):
    class Longest(LanguageModelInput):
        """Leaves short documents out."""

        def example(self, document):
            return super().example(document) if len(document.text) > 3 else None

    cfg = config(corpus, tokenizer=TOGETHER)
    settings = {k: getattr(cfg, k) for k in ("batch_size", "sequence_length", "source", "tokenizer")}
    text_input = Longest.Config(**settings).build()
    documents = [Document("one"), Document("three")]
    assert text_input.examples(documents) == [None]
    assert len(text_input.examples(documents, 1)) == 1


@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_resume_is_exact_within_a_record_of_many_documents(tmp_path, packing):
    lines = [json.dumps({"text": f"def f{i}():\n    return {i}\n" * (i % 5 + 1)}) for i in range(300)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.txt").write_text("held out")
    cfg = config(tmp_path, tokenizer=TOGETHER, packing=packing, chunk=1 << 20, batch_size=1, num_shards=1)
    iterator = cfg.build().train()
    take(iterator, 11)
    state, expected = through_json(iterator.get_state()), take(iterator, 5)
    again = cfg.build().train()
    again.set_state(state)
    assert equal(take(again, 5), expected)
    iterator.close()
    again.close()
