"""Suite for tokenizers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from axlearn_core.config import Node
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import CountsBytes, EncodesBatches, EncodesPrompts, EncodesSpecialTokens, get_digest

TEXTS = (
    "a",
    " ",
    "def f(x):\n    return x\n",
    "grüße, 世界 😀",
    "  two  spaces\t\r\n\r\n",
    "a\x00b",
    "<|endoftext|></s><eos>",  # plain text within a document
)


class TokenizerSuite:
    """Tests that every tokenizer must pass.

    Attributes:
        config: Config of the tokenizer.
        texts: Texts to test it on.
        lossless: Whether decoding restores all of these texts.
    """

    config: Node[Any]
    texts: Sequence[str] = TEXTS
    lossless: bool = True

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer, as an input does."""
        return self.config.build()

    def encode_texts(self) -> Iterator[tuple[Tokenizer, str, list[int]]]:
        """Yield (tokenizer, text, ids) for each text."""
        tokenizer = self.tokenizer()
        for text in self.texts:
            yield tokenizer, text, tokenizer.encode(text)

    def test_ids_are_below_vocab_size(self) -> None:
        for tokenizer, text, ids in self.encode_texts():
            assert type(ids) is list, "encode must return a list"
            assert ids, f"{text!r} has no tokens"
            assert all(type(i) is int for i in ids), f"ids must be plain integers: {ids}"
            assert min(ids) >= 0, f"{text!r} has the negative id {min(ids)}"
            assert max(ids) < tokenizer.vocab_size, (
                f"{text!r} has id {max(ids)}, but vocab_size is {tokenizer.vocab_size}"
            )

    def test_text_does_not_encode_to_eos(self) -> None:
        for tokenizer, text, ids in self.encode_texts():
            assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
            assert tokenizer.eos_id not in ids, (
                f"{text!r} contains eos_id {tokenizer.eos_id}, which would end the document"
            )

    def test_empty_text_has_no_tokens(self) -> None:
        tokenizer = self.tokenizer()
        assert tokenizer.encode("") == []
        assert tokenizer.decode([]) == ""

    def test_decode_inverts_encode(self) -> None:
        if not self.lossless:
            pytest.skip("needs a lossless tokenizer: set `lossless`")
        for tokenizer, text, ids in self.encode_texts():
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_id]) == text, "eos_id must decode to no text"

    def test_decoded_text_round_trips(self) -> None:
        decoded = [(tokenizer, tokenizer.decode(ids)) for tokenizer, _, ids in self.encode_texts()]
        assert any(text for _, text in decoded), "decode returns no text for any of the texts"
        for tokenizer, text in decoded:
            assert tokenizer.decode(tokenizer.encode(text)) == text, f"{text!r} changes when it is encoded and decoded"

    def test_decode_accepts_any_ids(self) -> None:
        for tokenizer, _, ids in self.encode_texts():
            for end in range(len(ids) + 1):  # a model may stop within a character
                tokenizer.decode(ids[:end]).encode()
                tokenizer.decode(ids[end:]).encode()
        rng = np.random.default_rng(0)
        tokenizer = self.tokenizer()
        for _ in range(20):  # like samples from an untrained model
            tokenizer.decode(rng.integers(0, tokenizer.vocab_size, 16).tolist()).encode()

    def test_token_bytes_sum_to_text_bytes(self) -> None:
        tokenizer = self.tokenizer()
        if not isinstance(tokenizer, CountsBytes):
            pytest.skip("needs a tokenizer with `token_bytes`")
        sizes = tokenizer.token_bytes()
        assert (sizes.shape, sizes.dtype) == ((tokenizer.vocab_size,), np.float32)
        assert sizes[tokenizer.eos_id] == 0, "eos_id must have no bytes"
        assert (sizes >= 0).all()
        if self.lossless:
            for text in self.texts:
                assert sizes[tokenizer.encode(text)].sum() == len(text.encode()), (
                    f"{text!r}: {len(text.encode())} bytes"
                )

    def test_builds_are_deterministic(self) -> None:
        one, two = self.tokenizer(), self.tokenizer()
        assert (one.vocab_size, one.eos_id, get_digest(one)) == (two.vocab_size, two.eos_id, get_digest(two))
        assert [one.encode(t) for t in self.texts] == [two.encode(t) for t in self.texts]

    def test_batch_encoding_matches_single_encoding(self) -> None:
        tokenizer = self.tokenizer()
        if not isinstance(tokenizer, EncodesBatches):
            pytest.skip("needs a tokenizer with `encode_batch`")
        assert tokenizer.encode_batch([]) == []
        texts = [*self.texts, "", *reversed(self.texts)]
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]

    def test_prompt_contains_text(self) -> None:
        for tokenizer, text, ids in self.encode_texts():
            if not isinstance(tokenizer, EncodesPrompts):
                pytest.skip("needs a tokenizer with `encode_prompt`")
            if isinstance(tokenizer, EncodesSpecialTokens):  # a prompt may contain special tokens
                ids, _ = tokenizer.encode_special(text)
            prompt = tokenizer.encode_prompt(text)
            assert any(prompt[i : i + len(ids)] == ids for i in range(len(prompt) - len(ids) + 1)), (
                f"{text!r}: {prompt}"
            )

    def test_special_tokens_have_positions(self) -> None:
        for tokenizer, text, _ in self.encode_texts():
            if not isinstance(tokenizer, EncodesSpecialTokens):
                pytest.skip("needs a tokenizer with `encode_special`")
            ids, places = tokenizer.encode_special(text)
            assert len(ids) == len(places)
            assert all(0 <= begin <= end <= len(text) for begin, end in places), f"{text!r}: {places}"
            assert [b for b, _ in places] == sorted(b for b, _ in places), "places must be in text order"
