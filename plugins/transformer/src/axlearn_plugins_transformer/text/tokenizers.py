"""Tokenizers: UTF-8 bytes, or a `tokenizer.json` of the Hugging Face `tokenizers` library."""

import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from axlearn_core.config import Configurable, node, setting
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import CountsBytes, EncodesSpecialTokens
from axlearn_core.errors import InputError, Problem, nearest
from axlearn_plugins_transformer.text.data_files import open_file
from axlearn_plugins_transformer.text.protocols import HasAddedTokens, bos_id_of
from axlearn_plugins_transformer.text.token_lengths import most_characters


class ByteTokenizer(Configurable):
    """UTF-8 bytes as ids 0 to 255. Id 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    digest = "utf-8 bytes"

    @node
    class Config(Configurable.Config["ByteTokenizer"]):
        """A config without settings."""

    def __init__(self, cfg: Config):
        pass

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise _not_unicode(text) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the bytes and replace invalid UTF-8.

        The end-of-document id adds no text.
        """
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def longest_token(self) -> int:
        """Return 1, because a character has at least one byte."""
        return 1

    def token_bytes(self) -> np.ndarray:
        """Return the number of text bytes per token, float32 [vocab_size]."""
        return np.array([1.0] * 256 + [0.0], np.float32)


MAX_IDS = 1 << 24
"""Limit on token ids. No real vocabulary comes close to it; a larger id would only waste memory."""
BUILTIN = ("python-2k",)
_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "<|eot_id|>")


class TokenizerJson(Configurable):
    """A tokenizer from a `tokenizer.json` file, or one that ships with this package.

    `python-2k` is a byte-level BPE of 2,048 tokens for Python source code, from `plugins/transformer/train_tokenizer.py`.
    """

    @node
    class Config(Configurable.Config["TokenizerJson"]):
        """Settings for the tokenizer. Set exactly one of `path` and `builtin`.

        Attributes:
            path: A `tokenizer.json` file.
            builtin: Name of a tokenizer that ships with this package.
            eos: Token that ends a document. None looks for a common one in the vocabulary.
            bos: Token at the beginning of documents and prompts, or None if the model does not use one.
        """

        path: str | None = setting(
            default=None,
            asset=True,
            siblings=(
                "tokenizer_config.json",
                "chat_template.jinja",
                "chat_template.json",
                "special_tokens_map.json",
                "additional_chat_templates/tool_use.jinja",
                "config.json",
                "generation_config.json",
            ),
        )
        builtin: str | None = None
        eos: str | None = None
        bos: str | None = None

        def validate(self) -> Iterable[Problem]:
            """Check that exactly one of `path` and `builtin` is set, and that `builtin` exists."""
            if (self.path is None) == (self.builtin is None):
                yield Problem(path="path", message="set exactly one of path and builtin")
            if self.builtin is not None and self.builtin not in BUILTIN:
                yield Problem(
                    path="builtin",
                    message=f"this package does not ship a tokenizer {self.builtin!r}",
                    expected=f"one of {', '.join(BUILTIN)}",
                    nearest=nearest(self.builtin, BUILTIN),
                )

    def __init__(self, cfg: Config):
        if cfg.builtin is not None:
            name = cfg.builtin
            raw = (
                importlib.resources.files("axlearn_plugins_transformer.text")
                .joinpath(f"{cfg.builtin}.json")
                .read_bytes()
            )
        else:
            name = os.path.expanduser(cfg.path or "")
            with open_file(name) as handle:
                raw = handle.read()
        self.name = name
        self.folder = None if cfg.path is None else os.path.dirname(name)
        self.digest = hashlib.sha256(raw).hexdigest()[:16]
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except ValueError as error:
            raise InputError(f"{name} is not a readable tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, not a special token
        self._limits = _limits(self._tokenizer, raw)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_IDS:
            raise InputError(
                f"the tokenizer {name} has the id {self.vocab_size - 1:,}\n    expected: less than {MAX_IDS:,}"
            )
        tokens = [t for t in ((cfg.eos,) if cfg.eos else _EOS) if t in vocab]
        if not tokens:
            tried = repr(cfg.eos) if cfg.eos else f"one of {', '.join(_EOS)}"
            raise InputError(
                f"the tokenizer {name} has no end-of-document token: expected {tried}\n"
                "    fix: set eos to the token that ends a document"
            )
        self.eos_token, self.eos_id = tokens[0], vocab[tokens[0]]
        # A second copy for rendered templates, in which spelled-out special tokens are parsed.
        self._special = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        self._special.encode_special_tokens = False
        if cfg.bos is not None and cfg.bos not in vocab:
            raise InputError(
                f"the tokenizer {name} has no token {cfg.bos!r}\n    fix: set bos to one of its tokens, or to null"
            )
        self.bos_token, self.bos_id = cfg.bos, None if cfg.bos is None else vocab[cfg.bos]
        self._tail = _prompt_suffix(self._special) if cfg.bos is not None else []

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Id -> spelling of tokens that do not represent text."""
        return {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    @functools.cached_property
    def added_tokens(self) -> dict[int, str]:
        """Id -> spelling of added tokens, including special tokens."""
        return {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items()}

    def encode_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids and their character ranges [start, stop).

        Spelled-out special tokens are parsed.
        """
        with _encoding(text):
            (encoding,) = self._special.encode_batch([text], add_special_tokens=False)  # `encode` holds the GIL
        return encoding.ids, encoding.offsets

    def encode(self, text: str) -> list[int]:
        """Return the token ids, without adding special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without adding special tokens.

        Several texts are encoded in parallel.
        """
        with _encoding(*texts):
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )  # this is a third faster, even for a single text
        return [encoding.ids for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text for the model to continue, as `tokenizer(text)` of `transformers` does.

        Spelled-out special tokens are parsed. `bos` is prepended unless the text already begins with it.
        """
        ids, _ = self.encode_special(text)
        front = [] if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id]
        return front + ids + self._tail

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`.

        Includes padding and truncation, which this class does not apply.
        """
        text = self._tokenizer.to_str(pretty=False)
        return json.dumps({**json.loads(text), **self._limits}, ensure_ascii=False) if self._limits else text

    def token(self, token_id: int) -> str | None:
        """Return the spelling of an id in the vocabulary, or None."""
        return self._tokenizer.id_to_token(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens and replace invalid UTF-8. Special tokens add no text."""
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]  # `decode` holds the GIL

    def longest_token(self) -> int | None:
        """Return the maximum number of characters that a token represents.

        Returns None if it is unbounded.
        """
        return most_characters(self._tokenizer)

    def token_bytes(self) -> np.ndarray:
        """Return the number of text bytes per token, float32 [vocab_size].

        It is 0 for special tokens.
        """
        sizes = np.zeros(self.vocab_size, np.float32)
        byte_level = '"type":"ByteLevel"' in self._tokenizer.to_str(pretty=False)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index not in self.special_tokens:
                sizes[index] = _count_bytes(token, byte_level)
        return sizes


def _limits(tokenizer: tokenizers.Tokenizer, raw: bytes) -> dict[str, Any]:
    """Return the padding and truncation fields of a tokenizer.json, if any."""
    if tokenizer.padding is None and tokenizer.truncation is None:
        return {}
    data = json.loads(raw)
    return {name: data[name] for name in ("padding", "truncation") if data.get(name) is not None}


def _prompt_suffix(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Return the ids that a tokenizer.json's post-processor appends to a text.

    Most post-processors do not append any.
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    if not plain:
        return []
    starts = [i for i in range(len(ids) - len(plain) + 1) if ids[i : i + len(plain)] == plain]
    return ids[starts[0] + len(plain) :] if starts else []


@contextlib.contextmanager
def _encoding(*texts: str) -> Iterator[None]:
    """Convert errors from the tokenizers library into InputError."""
    try:
        yield
    except TypeError as error:
        raise _not_unicode(*texts) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's panic, which is not a subclass of Exception
            raise
        label = f"a text of {len(texts[0]):,} characters" if len(texts) == 1 else f"one of {len(texts)} texts"
        raise InputError(
            f"the tokenizer fails on {label}: {error}\n"
            "    fix: use a tokenizer.json with patterns that do not backtrack, or remove the text"
        ) from None


def _not_unicode(*texts: str) -> InputError:
    """Return the error for a text with lone surrogates.

    JSON can represent them, but they cannot be encoded in UTF-8.
    """
    positions = ((text, i) for text in texts for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    text, index = next(positions, ("", 0))
    return InputError(
        f"a text is not valid Unicode\n    got: the lone surrogate {text[index : index + 1]!r} at character {index:,}\n"
        "    fix: write the text as UTF-8"
    )


def _count_bytes(token: str, byte_level: bool) -> int:
    if byte_level:
        return len(token)  # one printable character per byte
    if len(token) == 6 and token.startswith("<0x"):
        return 1  # SentencePiece's byte fallback
    return len(token.replace("\u2581", " ").encode())


def tokens_beyond(tokenizer: Tokenizer, vocab_size: int) -> dict[int, str | None]:
    """Return the tokens that a model with `vocab_size` rows cannot read.

    Maps ids to spellings, or to None for tokens in the base vocabulary. `transformers` accepts a tokenizer with more
    added tokens than the model has rows, as long as no text uses them.
    """
    added_tokens = tokenizer.added_tokens if isinstance(tokenizer, HasAddedTokens) else {}
    return {i: added_tokens.get(i) for i in range(vocab_size, tokenizer.vocab_size)}


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int | None) -> Iterator[Problem]:
    """Yield problems if a model's vocabulary is too small for its tokenizer.

    Added tokens beyond the vocabulary are accepted; `check_ids` rejects texts that use them.

    Args:
        tokenizer: Tokenizer of the input.
        vocab_size: Size of the model's vocabulary, or None for a model without one.
    """
    if vocab_size is None or tokenizer.vocab_size <= vocab_size:
        return
    needed = {tokenizer.eos_id, bos_id_of(tokenizer)}
    unreadable = tokens_beyond(tokenizer, vocab_size)
    if None in unreadable.values() or needed & unreadable.keys():
        yield Problem(
            path="model.vocab_size",
            message=f"is {vocab_size}, less than the {tokenizer.vocab_size} ids of input.tokenizer",
            fix=f"set model.vocab_size to at least {tokenizer.vocab_size}, or use another tokenizer",
        )


def special_tokens_problems(tokenizer: Tokenizer, special_tokens: str) -> Iterator[Problem]:
    """Yield problems with the setting `input.special_tokens`.

    Not every tokenizer can parse special tokens.
    """
    if special_tokens == "parse" and not isinstance(tokenizer, EncodesSpecialTokens):
        yield Problem(
            path="input.special_tokens",
            message="this tokenizer cannot parse special tokens in a text",
            got=f"parse, with {type(tokenizer).__name__}",
            expected="text",
        )


def check_ids(tokenizer: Tokenizer, ids: Iterable[int], vocab_size: int | None, location: str) -> None:
    """Raise InputError if a text contains a token outside the model's vocabulary.

    Args:
        tokenizer: Tokenizer of the text.
        ids: Tokens of the text.
        vocab_size: Size of the model's vocabulary, or None to accept all tokens.
        location: Name of the text in the error.
    """
    if vocab_size is None or tokenizer.vocab_size <= vocab_size:
        return
    if unknown := next((i for i in ids if i >= vocab_size), None):
        name = tokens_beyond(tokenizer, vocab_size).get(unknown)
        raise InputError(
            f"{location}: contains a token outside the model's vocabulary\n    got: {name!r}, id {unknown}\n"
            f"    expected: ids below {vocab_size}\n    fix: remove the token from the text, or add rows to the model"
        )


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Return the bytes per token, float32 [vocab_size].

    Uses the tokenizer's table, or decodes each token.
    """
    if isinstance(tokenizer, CountsBytes):
        return tokenizer.token_bytes()
    sizes = [len(tokenizer.decode([i]).encode()) for i in range(tokenizer.vocab_size)]
    return np.array([0 if i == tokenizer.eos_id else n for i, n in enumerate(sizes)], np.float32)
