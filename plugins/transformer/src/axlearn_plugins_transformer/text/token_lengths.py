"""Bounds on the length of text that a token can represent."""

import json
from typing import Any, Protocol, runtime_checkable

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from axlearn_core.contracts.parts import Tokenizer

_COMPOSED = 4  # maximum number of characters that NFC composes into one
_SHRINKS = {"NFC": _COMPOSED, "NFKC": _COMPOSED} | dict.fromkeys(
    ("NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel"), 1
)
"""Normalizer -> maximum number of input characters per output character."""
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits"}
"""Pre-tokenizers that do not drop characters."""


@runtime_checkable
class BoundsTokens(Protocol):
    """A tokenizer with a known bound on the text of a token."""

    def longest_token(self) -> int | None:
        """Return the maximum number of characters that a token represents.

        Returns None if it is unbounded.
        """
        ...


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the maximum number of characters that a token represents.

    Returns None if the tokenizer does not report it.
    """
    return tokenizer.longest_token() if isinstance(tokenizer, BoundsTokens) else None


def most_characters(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the maximum number of characters that a token represents.

    This function is for tokenizers from the `tokenizers` library.

    Returns None if there is no bound, or if the tokenizer has an unknown part. There is no bound if a part drops text,
    such as spaces or unknown characters, or if one token replaces an unknown word of any length.
    """
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # the token absorbs all spaces around it
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
        factor = _replacement_ratio(part) if part["type"] == "Replace" else _SHRINKS.get(part["type"])
        if factor is None:
            return None
        longest *= factor
    for part in splitters:
        if part["type"] not in _KEEPS_ALL and part.get("behavior", "Removed") == "Removed":
            return None
    return longest


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the normalizers or pre-tokenizers of a tokenizer, in sequence."""

    def flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [leaf for child in part[name] for leaf in flatten(child)] if part["type"] == "Sequence" else [part]

    return [] if component is None else flatten(json.loads(component.__getstate__()))


def _reads_everything(model: Any, vocabulary: dict[str, int], byte_level: bool) -> bool:
    """Return whether every character becomes at least one token."""
    if byte_level:
        return isinstance(model, tokenizers.models.BPE) and all(c in vocabulary for c in ByteLevel.alphabet())
    if isinstance(model, tokenizers.models.BPE):
        falls_back = model.byte_fallback
    elif isinstance(model, tokenizers.models.Unigram):
        falls_back = b'"byte_fallback":true' in model.__getstate__()[-64:]
    else:
        return False
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _replacement_ratio(part: dict[str, Any]) -> int | None:
    pattern, content = part["pattern"].get("String"), part["content"]
    return None if pattern is None or not content else -(-len(pattern) // len(content))
