"""Incremental decoding of tokens to text, with stop strings.

All code that generates text uses this module.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs
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


@attrs.frozen(kw_only=True)
class OutputOptions:
    """Options that determine the text of an output.

    Attributes:
        stops: Strings that end the output. The text ends before them.
        min_tokens: Number of tokens before which no stop string ends the output.
        include_stop: Whether the text includes the stop string.
        spell_special: Whether the text includes the spelling of special tokens.
        spelled: Spellings of special tokens that the text includes in any case.
    """

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    spell_special: bool = False
    spelled: frozenset[str] = frozenset()


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

    def new(self, prompt: Sequence[int], *, spell_special: bool = False) -> Decoder:
        """Return a decoder for the tokens after `prompt`.

        The first token may decode differently without its context.

        Args:
            prompt: Tokens before the output.
            spell_special: Whether to decode special tokens to their spelling instead of omitting them.
        """
        context = list(prompt[-8:])
        if self.tokenizer.decode(context).endswith("\ufffd"):  # the output does not complete an incomplete character
            context = []
        if self._library is not None:
            return StreamDecoder(self._library, context, skip_special=not spell_special)
        if spell_special:
            return SpellingDecoder(self.tokenizer, context, self._special)
        return WindowDecoder(self.tokenizer, context)

    def output(self, prompt: Sequence[int], options: OutputOptions = OutputOptions()) -> "OutputText":
        """Return a decoder for the tokens after `prompt` that stops at the first stop string."""
        return OutputText(self.new(prompt, spell_special=options.spell_special), self._special, options)

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

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[int], *, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=skip_special)
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
        self._stream = DecodeStream(ids=[*self._open, token][-8:], skip_special_tokens=self._skip_special)
        return text

    def _difference(self, tokens: Sequence[int]) -> str:
        prefix = self._tokenizer.decode(self._known, skip_special_tokens=self._skip_special)
        return self._tokenizer.decode([*self._known, *tokens], skip_special_tokens=self._skip_special)[len(prefix) :]


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


class SpellingDecoder:
    """A decoder for any tokenizer that also spells special tokens."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], special: Mapping[int, str]):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = WindowDecoder(tokenizer, context)

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        if (spelling := self._special.get(token)) is None:
            return self._decoder.push(token)
        text = self._decoder.end() + spelling
        self._decoder = WindowDecoder(self._tokenizer, ())
        return text

    def end(self) -> str:
        """Return the text that is still incomplete."""
        return self._decoder.end()


class StopFinder:
    """Cuts a text before its first stop string.

    It does not matter how the text is split into pieces. Text that may begin a stop string is held back. If there are
    several stop strings, the one that is complete first ends the text. If several are complete at the same character,
    the longest wins.

    Args:
        stops: Stop strings.
        include_stop: Whether to cut the text after the stop string instead.

    Attributes:
        matched_stop: The stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False):
        self._stops, self._include_stop = tuple(stops), include_stop
        self._text, self._shown = "", ""  # pending text, and for each character "1" if it belongs to the output
        self.matched_stop: str | None = None

    def push(self, text: str, *, shown: bool = True, may_stop: bool = True) -> str:
        """Append a piece of the output and return the text that can be released.

        Args:
            text: The piece.
            shown: Whether it is part of the output. The spelling of a special token is not part of the output, but may match a
                stop string.
            may_stop: Whether a stop string that this piece completes ends the text.
        """
        if self.matched_stop is not None:
            return ""
        if not self._stops:
            return text if shown else ""
        num_pending = len(self._text)
        self._text += text
        self._shown += ("1" if shown else "0") * len(text)
        starts = {stop: self._text.find(stop, max(0, num_pending + 1 - len(stop))) for stop in self._stops}
        ends = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
        if ends and may_stop:
            end, start, self.matched_stop = min(ends)
            piece = self._take(end if self._include_stop else start)
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

    def __init__(self, decoder: Decoder, special: Mapping[int, str], options: OutputOptions = OutputOptions()):
        self._decoder, self._special, self._options = decoder, special, options
        self._finder = StopFinder(options.stops, include_stop=options.include_stop)
        # Special tokens that the decoder omits can still match stop strings.
        self._matches_special = not options.spell_special and (
            bool(options.spelled)
            or any(spelling in stop or stop in spelling for stop in options.stops for spelling in special.values())
        )
        self._count = 0
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
        self._count += 1
        self.decoded += len(text)
        may_stop = self._count > self._options.min_tokens
        piece = self._finder.push(text, may_stop=may_stop)
        if self._matches_special and (spelling := self._special.get(token)) is not None:
            shown = spelling in self._options.spelled
            self.decoded += len(spelling) if shown else 0
            piece += self._finder.push(spelling, shown=shown, may_stop=may_stop)
        return piece

    def push_stop_token(self, token: int) -> str:
        """Append the token that ended the output, and return its text if the output includes it."""
        return self.push(token) if self._options.include_stop else ""

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
