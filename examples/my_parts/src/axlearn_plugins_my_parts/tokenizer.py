"""The component `character-tokenizer`."""

import hashlib
import string
from collections.abc import Iterable, Sequence

import numpy as np

from axlearn_core.extend import Configurable, Problem, node


class Characters(Configurable):
    """One id for each character of an alphabet, one for all other characters, one that ends a document."""

    @node
    class Config(Configurable.Config["Characters"]):
        """`alphabet`: the characters that decoding gives back."""

        alphabet: str = string.printable

        def validate(self) -> Iterable[Problem]:
            """Reports characters that occur twice."""
            if twice := sorted({c for c in self.alphabet if self.alphabet.count(c) > 1}):
                yield Problem(path="alphabet", message="has characters twice", got=repr("".join(twice)))

    def __init__(self, cfg: Config):
        self.alphabet = cfg.alphabet
        self.ids = {character: i for i, character in enumerate(cfg.alphabet)}
        self.unknown_id, self.eos_id, self.vocab_size = len(self.ids), len(self.ids) + 1, len(self.ids) + 2
        self.digest = hashlib.sha256(cfg.alphabet.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """One id per character."""
        return [self.ids.get(character, self.unknown_id) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with U+FFFD for characters outside the alphabet."""
        return "".join((*self.alphabet, "\N{REPLACEMENT CHARACTER}", "")[i] for i in ids)

    def token_bytes(self) -> np.ndarray:
        """float32 [vocab_size]: the UTF-8 length of each character; 1 for unknown ones, 0 at the end of a document."""
        return np.array([*(len(c.encode()) for c in self.alphabet), 1, 0], np.float32)
