"""Encodes a prompt with its answer."""

from collections.abc import Sequence
from typing import Any, Literal

from axlearn_core.contracts.parts import Tokenizer
from axlearn_plugins_transformer.text.protocols import bos_id_of, first_token
from axlearn_plugins_transformer.text.tokenizers import check_ids

SpecialTokens = Literal["text", "parse"]


class AnswerEncoder:
    """Encodes prompts and answers for training and scoring.

    Args:
        tokenizer: The tokenizer.
        special_tokens: `text` treats special tokens in the text as plain text; `parse` converts them to tokens.
        vocab_size: Number of rows in the model's embedding, or None if it is unknown.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens = "text", vocab_size: int | None = None):
        self._tokenizer, self._special, self._vocab_size = tokenizer, special_tokens, vocab_size

    def join(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Return `[bos, prompt..., answer..., eos]`, and the number of tokens before the answer.

        Without a BOS token, the first token is the end-of-document token.
        """
        prompt_ids = self.encode(prompt)
        if prompt_ids[:1] == [bos_id_of(self._tokenizer)]:  # the prompt already contains a BOS token
            prompt_ids = prompt_ids[1:]
        start = [first_token(self._tokenizer), *prompt_ids]
        return [*start, *self.encode(answer), self._tokenizer.eos_id], len(start)

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text. Raise `InputError` if the model has no row for one of them."""
        tokenizer: Any = self._tokenizer
        ids = tokenizer.encode(text) if self._special == "text" else tokenizer.encode_special(text)[0]
        check_ids(self._tokenizer, ids, self._vocab_size, f"the text {text[:60]!r}")
        return ids
