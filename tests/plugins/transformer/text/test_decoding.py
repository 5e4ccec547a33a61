"""Tokens to text, in pieces."""

import itertools
import random

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from axlearn_plugins_transformer.text.decoding import Decoders, StopFinder, StreamDecoder, WindowDecoder
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson

BYTES = ByteTokenizer.Config().build()
PYTHON = TokenizerJson.Config(builtin="python-2k").build()
SENTENCE = tokenizers.Tokenizer(
    tokenizers.models.BPE(
        {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "▁": 257, "a": 258, "▁a": 259, "</s>": 260},
        [("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
)
SENTENCE.add_special_tokens(["</s>"])
SENTENCE.decoder = tokenizers.decoders.Sequence(
    [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
)


class SentenceTokenizer:
    """A tokenizer with byte fallback that strips the space at the beginning of a text."""

    vocab_size, eos_id = 261, 260

    def __init__(self, library):
        if library:
            self.to_json = SENTENCE.to_str

    def decode(self, ids):
        return SENTENCE.decode(list(ids), skip_special_tokens=True)


TOKENIZERS = {
    "bytes": BYTES,
    "python": PYTHON,
    "fallback": SentenceTokenizer(True),
    "fallback-window": SentenceTokenizer(False),
}


class SpecialWindowTokenizer(SentenceTokenizer):
    """The same tokenizer without the library's file. It still lists its special tokens."""

    def __init__(self):
        super().__init__(False)
        self.special_tokens = {260: "</s>"}


@pytest.mark.parametrize("tokenizer", [SentenceTokenizer(True), SpecialWindowTokenizer()], ids=["library", "other"])
@pytest.mark.parametrize(
    ("tokens", "text"),
    [([258, 260], "a</s>"), ([260, 260, 258], "</s></s>a"), ([], ""), ([258, 260, 258], "a</s>a")],
)
def test_special_tokens_are_spelled_out_on_request(tokenizer, tokens, text):
    decoders = Decoders(tokenizer)
    assert decoders.spell(tokens) == text
    output = decoders.output(())
    assert "".join([*map(output.push, tokens), output.end()]) == text.replace("</s>", "")


def pieces(tokenizer, prompt, tokens):
    decoder = Decoders(tokenizer).new(prompt)
    return [*(decoder.push(token) for token in tokens), decoder.end()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_of_the_library_is_decoded_by_it(name):
    decoder = Decoders(TOKENIZERS[name]).new([1])
    assert isinstance(decoder, StreamDecoder if hasattr(TOKENIZERS[name], "to_json") else WindowDecoder)


@pytest.mark.fast_cases("python")
@pytest.mark.parametrize("tokenizer", [BYTES, PYTHON], ids=["bytes", "python"])
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=80), prompt=st.text(st.characters(codec="utf-8"), max_size=12))
@example(text="日本語 😀 é", prompt="a")
def test_pieces_of_a_text_are_the_text(tokenizer, text, prompt):
    tokens = tokenizer.encode(text)
    result = pieces(tokenizer, tokenizer.encode(prompt), tokens)
    assert "".join(result) == text
    assert not any("\ufffd" in piece for piece in result if "\ufffd" not in text)


@settings(deadline=None, max_examples=300)
@given(tokens=st.lists(st.integers(0, 256), max_size=120))
@example(tokens=[0xF0, 0x9F, 0x98])
@example(tokens=[0xFF] * 400)
@example(tokens=[0xF0, 0x9F, 0x98, 0x41, 0x80, 0x80])
def test_bytes_that_are_no_text_decode_as_they_do_together(tokens):
    assert "".join(pieces(BYTES, [65], tokens)) == BYTES.decode(tokens)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), length=st.integers(0, 60))
def test_any_tokens_of_a_byte_level_vocabulary_decode_as_they_do_together(seed, length):
    draw = random.Random(seed)
    tokens = [draw.randrange(1, PYTHON.vocab_size) for _ in range(length)]
    assert "".join(pieces(PYTHON, [100], tokens)) == PYTHON.decode(tokens)


@pytest.mark.parametrize("name", ["fallback", "fallback-window"])
def test_spaces_and_bytes_of_a_sentence_tokenizer(name):
    smile = [b + 1 for b in "😀".encode()]
    tokens = [259, 259, *smile, 259]
    assert "".join(pieces(TOKENIZERS[name], [258], tokens)) == " a a😀 a"
    assert [p for p in pieces(TOKENIZERS[name], [258], smile) if p] == ["😀"]
    assert "".join(pieces(TOKENIZERS[name], [258], [259, 260])) == " a"


@given(
    text=st.text("ab.", max_size=40),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=12),
)
@example(text="aab", stops=["ab"], cuts=[1, 2])
@example(text="abab.", stops=["abab.", "bab"], cuts=[1, 2, 3, 4])
def test_stop_strings_are_found_wherever_the_pieces_are_cut(text, stops, cuts):
    finder, output = StopFinder(stops), ""
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    for start, stop in itertools.pairwise(edges):
        output += finder.push(text[start:stop])
        assert not any(s in output for s in stops)
    if finder.matched_stop is None:
        output += finder.end()
        assert output == text
        assert not any(s in text for s in stops)
        return
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    end, _, first = min(ends)
    assert finder.matched_stop == first
    assert output == text[: end - len(first)]
    assert finder.push("more") == ""


def test_text_is_held_back_no_longer_than_needed():
    finder = StopFinder(["\n\n", "END"])
    assert [finder.push(p) for p in ("a", "\n", "b", "E", "N", "x", "\n", "\n", "c")] == [
        "a", "", "\nb", "", "", "ENx", "", "", "",
    ]  # fmt: skip
    assert finder.matched_stop == "\n\n"
