"""The `character-tokenizer` component."""

import hashlib
import string
from collections.abc import Iterable, Sequence

import numpy as np

from axlearn_core.extend import Configurable, Problem, node


class Characters(Configurable):
    """A tokenizer with one id per character of an alphabet.

    There is one more id for all other characters, and one for the end of a document.
    """

    @node
    class Config(Configurable.Config["Characters"]):
        """Settings for `Characters`.

        Attributes:
            alphabet: Characters to encode.
        """

        alphabet: str = string.printable

        def validate(self) -> Iterable[Problem]:
            """Report duplicate characters."""
            if duplicates := sorted({c for c in self.alphabet if self.alphabet.count(c) > 1}):
                yield Problem(path="alphabet", message="has duplicate characters", got=repr("".join(duplicates)))

    def __init__(self, cfg: Config):
        self.alphabet = cfg.alphabet
        self.ids = {character: i for i, character in enumerate(cfg.alphabet)}
        self.unknown_id, self.eos_id, self.vocab_size = len(self.ids), len(self.ids) + 1, len(self.ids) + 2
        self.digest = hashlib.sha256(cfg.alphabet.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Return one id per character."""
        return [self.ids.get(character, self.unknown_id) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, with U+FFFD for characters outside the alphabet."""
        return "".join((*self.alphabet, "\N{REPLACEMENT CHARACTER}", "")[i] for i in ids)

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 length of each token, float32 [vocab_size].

        Unknown characters count as 1, and the end of a document as 0.
        """
        return np.array([*(len(c.encode()) for c in self.alphabet), 1, 0], np.float32)
