"""The maximum number of characters of a token, or None if there is no bound."""

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from axlearn_plugins_transformer.text.token_lengths import most_characters
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson

BYTES = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(*added, normalizer=None, splitter=None, vocabulary=BYTES):
    vocabulary = {**vocabulary, "abcde": 300}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = last if splitter is None else pre_tokenizers.Sequence([splitter, last])
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def with_model(model, normalizer=None, splitter=None):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    return tokenizer


BPE = {**FALLBACK, "abcdefg": 256}
SPM = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
PIECES = [*((piece, 0.0) for piece in FALLBACK), ("abcdefg", 0.0)]
KNOWN = {
    "byte level": (byte_level(), 5),
    "special tokens count": (byte_level("<|endoftext|>"), 13),
    "NFC": (byte_level(normalizer=normalizers.NFC()), 20),  # a token of 5 characters had up to 20 before
    "split, isolated": (byte_level(splitter=pre_tokenizers.Split(Regex(r"\s+"), "isolated")), 5),
    "digits": (byte_level(splitter=pre_tokenizers.Digits(True)), 5),
    "byte fallback": (with_model(models.BPE(BPE, [], byte_fallback=True), SPM), 7),
    "unigram": (with_model(models.Unigram(PIECES, 0, True), SPM, pre_tokenizers.Metaspace()), 7),
    "replaced by less": (with_model(models.BPE(BPE, [], byte_fallback=True), normalizers.Replace("abc", "x")), 21),
}
UNKNOWN = {
    "an alphabet with a hole": byte_level(vocabulary=dict(list(BYTES.items())[1:])),
    "a token that absorbs spaces": byte_level(AddedToken("<end>", rstrip=True)),
    "spaces stripped": byte_level(normalizer=normalizers.Strip()),
    "a normalizer in a sequence": byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()])),
    "spaces replaced by one": byte_level(normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
    "text removed": byte_level(normalizer=normalizers.Replace("a", "")),
    "split, removed": byte_level(splitter=pre_tokenizers.Split(" ", "removed")),
    "spaces dropped": byte_level(splitter=pre_tokenizers.WhitespaceSplit()),
    "words": with_model(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"), None, pre_tokenizers.Whitespace()),
    "word pieces": with_model(
        models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"), None, pre_tokenizers.BertPreTokenizer()
    ),
    "unknown characters dropped": with_model(models.BPE({"a": 0}, [])),
    "unknown characters fused": with_model(models.Unigram([("<unk>", 0.0), ("a", 0.0)], 0, False)),
    "a byte without a token": with_model(models.BPE(dict(list(BPE.items())[1:]), [], byte_fallback=True)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_most_characters(name):
    tokenizer, expected = KNOWN[name]
    assert most_characters(tokenizer) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_tokenizers_without_a_bound(name):
    assert most_characters(UNKNOWN[name]) is None


@pytest.mark.parametrize(
    ("name", "text"), [("spaces dropped", " " * 99), ("words", "x" * 99), ("unknown characters dropped", "x" * 99)]
)
def test_texts_of_any_length_have_a_token_at_most_there(name, text):
    assert len(UNKNOWN[name].encode(text).ids) <= 1


def test_the_tokenizers_of_this_package():
    assert ByteTokenizer.Config().build().longest_token() == 1
    tokenizer = TokenizerJson.Config(builtin="python-2k").build()
    assert tokenizer.longest_token() == max(len(tokenizer.token(i)) for i in range(tokenizer.vocab_size))
