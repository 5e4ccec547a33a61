"""Tokens to text as they come: incremental decoding, and stop strings. Every path that generates text decodes here."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import tokenizers
from tokenizers.decoders import DecodeStream

from axlearn_core.contracts.parts import Tokenizer
from axlearn_plugins_transformer.text.protocols import special_tokens_of

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
        self._special = special_tokens_of(tokenizer)
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

    def output(self, prompt: Sequence[int], stops: Sequence[str] = ()) -> "OutputText":
        """The text of an output that follows `prompt`, up to the first of `stops`."""
        return OutputText(self.new(prompt), self._special, stops)

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens with the spellings of special tokens, which an output leaves out."""
        if self._library is not None:
            return self._library.decode_batch([list(tokens)], skip_special_tokens=False)[0]  # `decode` keeps the GIL
        runs = itertools.groupby(tokens, key=self._special.get)
        return "".join(
            self.tokenizer.decode(list(run)) if spelling is None else spelling * len(list(run))
            for spelling, run in runs
        )


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
        matched_stop: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._text, self._shown = "", ""  # held back; for each character, "1" if it belongs to the output
        self.matched_stop: str | None = None

    def push(self, text: str, *, shown: bool = True) -> str:
        """Take the next piece of the output and return the text that is certain now.

        Args:
            text: the piece.
            shown: whether it is part of the output. The spelling of a special token is not, but may be a stop string.
        """
        if self.matched_stop is not None:
            return ""
        if not self._stops:
            return text if shown else ""
        self._text += text
        self._shown += ("1" if shown else "0") * len(text)
        starts = {stop: self._text.find(stop) for stop in self._stops}
        ends = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
        if ends:
            _, start, self.matched_stop = min(ends)
            piece = self._take(start)
            self._text = self._shown = ""
            return piece
        return self._take(len(self._text) - max(_overlap(self._text, stop) for stop in self._stops))

    def end(self) -> str:
        """The text that was held back: nothing follows that would make it a stop string."""
        return self._take(len(self._text))

    def _take(self, count: int) -> str:
        text, shown = self._text[:count], self._shown[:count]
        self._text, self._shown = self._text[count:], self._shown[count:]
        return text if "0" not in shown else "".join(c for c, s in zip(text, shown, strict=True) if s == "1")


class OutputText:
    """The text of one output, up to the first stop string.

    Attributes:
        decoded: characters of the output that the tokens so far stand for, complete or not yet released.
    """

    def __init__(self, decoder: Decoder, special: Mapping[int, str], stops: Sequence[str] = ()):
        self._decoder, self._special = decoder, special
        self._finder = StopFinder(stops)
        self._spells_special = any(
            spelling in stop or stop in spelling for stop in stops for spelling in special.values()
        )
        self.decoded = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the output."""
        return self._finder.matched_stop is not None

    def push(self, token: int) -> str:
        """Take the next token and return the text that is certain now."""
        text = self._decoder.push(token)
        self.decoded += len(text)
        piece = self._finder.push(text)
        if self._spells_special and (spelling := self._special.get(token)) is not None:
            piece += self._finder.push(spelling, shown=False)
        return piece

    def end(self) -> str:
        """The rest of the text: nothing follows."""
        rest = self._decoder.end()
        self.decoded += len(rest)
        return self._finder.push(rest) + self._finder.end()


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
