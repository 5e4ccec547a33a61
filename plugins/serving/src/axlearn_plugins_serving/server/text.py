"""Tokens to text as they come: incremental decoding, and stop strings."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import tokenizers
from tokenizers.decoders import DecodeStream

from axlearn_core.contracts.parts import Tokenizer

_HELD = 3  # bytes of a character that is not complete, each of which may stand as one replacement character
_WINDOW = 256


@runtime_checkable
class HasTokenizerJson(Protocol):
    """A tokenizer of the `tokenizers` library."""

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        ...


class Decoder(Protocol):
    """The text of one output. The texts of `push` and `end` together are what decoding all tokens at once gives."""

    def push(self, token: int) -> str:
        """The text that a token completes."""
        ...

    def end(self) -> str:
        """The text of what is not complete."""
        ...


class Decoders:
    """Makes a `Decoder` for each output of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._library = (
            tokenizers.Tokenizer.from_str(tokenizer.to_json()) if isinstance(tokenizer, HasTokenizerJson) else None
        )

    def new(self, prompt: Sequence[int]) -> Decoder:
        """A decoder of what follows `prompt`: the first token may decode otherwise at the beginning of a text."""
        context = list(prompt[-8:])
        if self.tokenizer.decode(context).endswith("\ufffd"):  # half a character: the output does not complete it
            context = []
        if self._library is not None:
            return StreamDecoder(self._library, context)
        return WindowDecoder(self.tokenizer, context)


class StreamDecoder:
    """Decodes with the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=True)
        self._known = list(context)  # tokens before those that are not complete
        self._open: list[int] = []

    def push(self, token: int) -> str:
        """See `Decoder`."""
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the library raises a bare Exception where a token changes the text before it
            text = self._restart(token)
        self._open.append(token)
        if not text:
            return ""
        self._known, self._open = self._open[-8:], []
        return text

    def end(self) -> str:
        """See `Decoder`."""
        return self._difference(self._open) if self._open else ""

    def _restart(self, token: int) -> str:
        text = self._difference([*self._open, token])
        self._stream = DecodeStream(ids=[*self._open, token][-8:], skip_special_tokens=True)
        return text

    def _difference(self, tokens: Sequence[int]) -> str:
        before = self._tokenizer.decode(self._known, skip_special_tokens=True)
        return self._tokenizer.decode([*self._known, *tokens], skip_special_tokens=True)[len(before) :]


class WindowDecoder:
    """Decodes the last tokens again with each new one; for any tokenizer."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._window = list(context)
        self._shown = len(tokenizer.decode(self._window))  # characters of the window's text
        self._previous = len(self._window)  # tokens of the window whose text is complete

    def push(self, token: int) -> str:
        """See `Decoder`."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        pending = 0
        if len(self._window) - self._previous < _WINDOW:
            while pending < min(_HELD, len(text) - self._shown) and text[len(text) - pending - 1] == "\ufffd":
                pending += 1
        new = text[self._shown : len(text) - pending]
        self._shown += len(new)
        if not pending:
            if len(self._window) > 16:  # keep the newest as context for the next
                self._window = self._window[-8:]
                self._shown = len(self._tokenizer.decode(self._window))
            self._previous = len(self._window)
        return new

    def end(self) -> str:
        """See `Decoder`."""
        return self._tokenizer.decode(self._window)[self._shown :]


class StopFinder:
    """Ends a text before the first stop string in it, wherever the pieces are cut.

    Text that may be the beginning of a stop string is held back. Of several stop strings the one that is complete first ends the
    text, and of those that are complete at the same character the longest.

    Attributes:
        matched_stop: the stop string that ended the text.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now."""
        if not self._stops or self.matched_stop is not None:
            return "" if self.matched_stop is not None else text
        text_so_far = self._held + text
        starts = {stop: text_so_far.find(stop) for stop in self._stops}
        ends = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
        if ends:
            _, start, self.matched_stop = min(ends)
            self._held = ""
            return text_so_far[:start]
        keep = max(_overlap(text_so_far, stop) for stop in self._stops)
        self._held = text_so_far[len(text_so_far) - keep :]
        return text_so_far[: len(text_so_far) - keep]

    def end(self) -> str:
        """The text that was held back: nothing follows that would make it a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
