"""Incremental decoding of tokens to text, with stop strings.

All code that generates text uses this module.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import tokenizers
from tokenizers.decoders import DecodeStream

from axlearn_core.contracts.parts import Tokenizer
from axlearn_plugins_transformer.text.protocols import special_tokens_of

_PENDING = 3  # bytes of an incomplete character, each of which may decode to one replacement character
_WINDOW = 256


@runtime_checkable
class HasTokenizerJson(Protocol):
    """A tokenizer from the `tokenizers` library."""

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`."""
        ...


class Decoder(Protocol):
    """Decodes one output.

    Joining the texts from `push` and `end` gives the same result as decoding all tokens at once.
    """

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        ...

    def end(self) -> str:
        """Return the text that is still incomplete."""
        ...


class Decoders:
    """Creates a `Decoder` for each output of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._special = special_tokens_of(tokenizer)
        self._library = (
            tokenizers.Tokenizer.from_str(tokenizer.to_json()) if isinstance(tokenizer, HasTokenizerJson) else None
        )

    def new(self, prompt: Sequence[int]) -> Decoder:
        """Return a decoder for the tokens after `prompt`.

        The first token may decode differently without its context.
        """
        context = list(prompt[-8:])
        if self.tokenizer.decode(context).endswith("\ufffd"):  # the output does not complete an incomplete character
            context = []
        if self._library is not None:
            return StreamDecoder(self._library, context)
        return WindowDecoder(self.tokenizer, context)

    def output(
        self, prompt: Sequence[int], stops: Sequence[str] = (), *, spelled: Collection[str] = ()
    ) -> "OutputText":
        """Return a decoder for the tokens after `prompt` that stops at the first of `stops`.

        Args:
            prompt: Tokens that precede the output.
            stops: Stop strings.
            spelled: Spellings of special tokens to include in the text. Other special tokens are left out.
        """
        return OutputText(self.new(prompt), self._special, stops, spelled=spelled)

    def spell(self, tokens: Sequence[int]) -> str:
        """Decode tokens, including special tokens, which outputs omit."""
        if self._library is not None:
            return self._library.decode_batch([list(tokens)], skip_special_tokens=False)[0]  # `decode` holds the GIL
        runs = itertools.groupby(tokens, key=self._special.get)
        return "".join(
            self.tokenizer.decode(list(run)) if spelling is None else spelling * len(list(run))
            for spelling, run in runs
        )


class StreamDecoder:
    """A decoder that uses the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=True)
        self._known = list(context)  # tokens before the incomplete ones
        self._open: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the library raises a plain Exception if a token changes earlier text
            text = self._restart(token)
        self._open.append(token)
        if not text:
            return ""
        self._known, self._open = self._open[-8:], []
        return text

    def end(self) -> str:
        """Return the text that is still incomplete."""
        return self._difference(self._open) if self._open else ""

    def _restart(self, token: int) -> str:
        text = self._difference([*self._open, token])
        self._stream = DecodeStream(ids=[*self._open, token][-8:], skip_special_tokens=True)
        return text

    def _difference(self, tokens: Sequence[int]) -> str:
        prefix = self._tokenizer.decode(self._known, skip_special_tokens=True)
        return self._tokenizer.decode([*self._known, *tokens], skip_special_tokens=True)[len(prefix) :]


class WindowDecoder:
    """A decoder for any tokenizer.

    For each new token, it decodes a window of recent tokens again.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._window = list(context)
        self._shown = len(tokenizer.decode(self._window))  # characters of the window's text
        self._previous = len(self._window)  # tokens of the window whose text is complete

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        pending = 0
        if len(self._window) - self._previous < _WINDOW:
            while pending < min(_PENDING, len(text) - self._shown) and text[len(text) - pending - 1] == "\ufffd":
                pending += 1
        new = text[self._shown : len(text) - pending]
        self._shown += len(new)
        if not pending:
            if len(self._window) > 16:  # keep the latest tokens as context
                self._window = self._window[-8:]
                self._shown = len(self._tokenizer.decode(self._window))
            self._previous = len(self._window)
        return new

    def end(self) -> str:
        """Return the text that is still incomplete."""
        return self._tokenizer.decode(self._window)[self._shown :]


class StopFinder:
    """Cuts a text before its first stop string.

    It does not matter how the text is split into pieces. Text that may begin a stop string is held back. If there are
    several stop strings, the one that is complete first ends the text. If several are complete at the same character,
    the longest wins.

    Attributes:
        matched_stop: The stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._text, self._shown = "", ""  # pending text, and for each character "1" if it belongs to the output
        self.matched_stop: str | None = None

    def push(self, text: str, *, shown: bool = True) -> str:
        """Append a piece of the output and return the text that can be released.

        Args:
            text: The piece.
            shown: Whether it is part of the output. The spelling of a special token is not part of the output, but may match a
                stop string.
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
        """Return the pending text, which can no longer become part of a stop string."""
        return self._take(len(self._text))

    def _take(self, count: int) -> str:
        text, shown = self._text[:count], self._shown[:count]
        self._text, self._shown = self._text[count:], self._shown[count:]
        return text if "0" not in shown else "".join(c for c, s in zip(text, shown, strict=True) if s == "1")


class OutputText:
    """The text of one output, up to the first stop string.

    Attributes:
        decoded: Number of decoded characters, including text that is not released yet.
    """

    def __init__(
        self,
        decoder: Decoder,
        special: Mapping[int, str],
        stops: Sequence[str] = (),
        *,
        spelled: Collection[str] = (),
    ):
        self._decoder, self._special, self._spelled = decoder, special, frozenset(spelled)
        self._finder = StopFinder(stops)
        self._spells_special = bool(spelled) or any(
            spelling in stop or stop in spelling for stop in stops for spelling in special.values()
        )
        self.decoded = 0

    @property
    def stopped(self) -> bool:
        """True if a stop string ended the output."""
        return self._finder.matched_stop is not None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._finder.matched_stop

    def push(self, token: int) -> str:
        """Append a token and return the text that can be released."""
        text = self._decoder.push(token)
        self.decoded += len(text)
        piece = self._finder.push(text)
        if self._spells_special and (spelling := self._special.get(token)) is not None:
            shown = spelling in self._spelled
            self.decoded += len(spelling) if shown else 0
            piece += self._finder.push(spelling, shown=shown)
        return piece

    def end(self) -> str:
        """Return the remaining text at the end of the output."""
        remainder = self._decoder.end()
        self.decoded += len(remainder)
        return self._finder.push(remainder) + self._finder.end()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
