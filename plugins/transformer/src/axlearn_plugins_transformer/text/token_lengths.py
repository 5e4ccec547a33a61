"""How much text a token can stand for."""

import json
from typing import Any, Protocol, runtime_checkable

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from axlearn_core.contracts.parts import Tokenizer

_COMPOSED = 4  # the most characters that NFC makes one of
_SHRINKS = {"NFC": _COMPOSED, "NFKC": _COMPOSED} | dict.fromkeys(
    ("NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel"), 1
)
"""Normalizers: the most characters of their input for each one of their output."""
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits"}
"""Pre-tokenizers that drop no character."""


@runtime_checkable
class BoundsTokens(Protocol):
    """A tokenizer that knows how long the text of a token can be."""

    def longest_token(self) -> int | None:
        """The most characters of text that one token stands for. Returns None if there is no such number."""
        ...


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of text that a token stands for. Returns None if the tokenizer does not tell."""
    return tokenizer.longest_token() if isinstance(tokenizer, BoundsTokens) else None


def most_characters(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The most characters of text that a token of the `tokenizers` library stands for.

    Returns None if there is no such number: if a part of the tokenizer drops text, such as spaces or unknown characters, or has
    one token for an unknown word of any length, or is of a kind that is not known here.
    """
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # the token takes in all spaces around it
    normalizers, splitters = (
        _parts(tokenizer.normalizer, "normalizers"),
        _parts(tokenizer.pre_tokenizer, "pretokenizers"),
    )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *splitters))
    if not _reads_everything(tokenizer.model, vocabulary, byte_level):
        return None
    longest = max(map(len, vocabulary))
    for part in normalizers:
        factor = _replaced(part) if part["type"] == "Replace" else _SHRINKS.get(part["type"])
        if factor is None:
            return None
        longest *= factor
    for part in splitters:
        if part["type"] not in _KEEPS_ALL and part.get("behavior", "Removed") == "Removed":
            return None
    return longest


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers that a tokenizer applies one after another, as its file has them."""

    def flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [leaf for child in part[name] for leaf in flatten(child)] if part["type"] == "Sequence" else [part]

    return [] if component is None else flatten(json.loads(component.__getstate__()))


def _reads_everything(model: Any, vocabulary: dict[str, int], byte_level: bool) -> bool:
    """Whether every character becomes at least one token."""
    if byte_level:
        return isinstance(model, tokenizers.models.BPE) and all(c in vocabulary for c in ByteLevel.alphabet())
    if isinstance(model, tokenizers.models.BPE):
        falls_back = model.byte_fallback
    elif isinstance(model, tokenizers.models.Unigram):
        falls_back = b'"byte_fallback":true' in model.__getstate__()[-64:]
    else:
        return False
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _replaced(part: dict[str, Any]) -> int | None:
    pattern, content = part["pattern"].get("String"), part["content"]
    return None if pattern is None or not content else -(-len(pattern) // len(content))
