"""`JsonScanner`: validates JSON text that arrives in pieces."""

import re
from typing import Literal

MAX_DEPTH = 100
"""Nesting of arrays and objects that is accepted. Common JSON parsers accept at least this depth."""
_MAX_WORD = 1000
"""Length of a number that is accepted. Longer words would have to be matched again for each piece."""

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_START = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}

_State = Literal["value", "first value", "first key", "key", "colon", "next", "string", "key string", "done", "failed"]


class JsonScanner:
    """Finds the end of one JSON value in text that arrives in pieces.

    It accepts a prefix of the text only if the prefix can be completed to valid JSON. Numbers, words and escape sequences are
    accepted as a whole. The time is linear in the length of the text, and the nesting is limited to `MAX_DEPTH`.
    """

    def __init__(self):
        self._stack: list[str] = []
        self._state: _State = "value"

    @property
    def complete(self) -> bool:
        """True after the last character of the value."""
        return self._state == "done"

    @property
    def failed(self) -> bool:
        """True if the text after the accepted part is not JSON."""
        return self._state == "failed"

    def scan(self, text: str, start: int = 0, *, final: bool = False) -> int:
        """Accept as much text as possible.

        Args:
            text: Text that continues the accepted text at `start`.
            start: Position of the first new character.
            final: Whether no more text follows, so a number at the end is complete.

        Returns:
            The position after the last accepted character.
        """
        at = start
        while at < len(text) and self._state not in ("done", "failed"):
            if self._state in ("string", "key string"):
                end = self._scan_string(text, at)
            else:
                at = _end(_SPACE, text, at)
                if at == len(text):
                    break
                end = self._scan_token(text, at, final)
            if end == at and self._state not in ("done", "failed"):
                break  # the token may continue in the next piece
            at = end
        return at

    def _scan_string(self, text: str, at: int) -> int:
        at = _end(_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._state = "colon" if self._state == "key string" else self._after_value()
            return at + 1
        if escape := _ESCAPE.match(text, at):
            return escape.end()
        if not _ESCAPE_START.match(text, at):
            self._state = "failed"
        return at

    def _scan_token(self, text: str, at: int, final: bool) -> int:
        """Accept one token, which is not the inside of a string."""
        char, state = text[at], self._state
        if state == "colon":
            self._state = "value" if char == ":" else "failed"
        elif state == "next":
            return self._scan_separator(char, at)
        elif char in "}]":
            empty = (state, char) in (("first key", "}"), ("first value", "]"))
            self._state = self._close() if empty else "failed"
        elif state in ("key", "first key"):
            self._state = "key string" if char == '"' else "failed"
        elif char == '"':
            self._state = "string"
        elif char in _CLOSERS:
            self._open(char)
        else:
            return self._scan_scalar(text, at, final)
        return at if self.failed else at + 1

    def _scan_separator(self, char: str, at: int) -> int:
        if char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif char == _CLOSERS[self._stack[-1]]:
            self._state = self._close()
        else:
            self._state = "failed"
            return at
        return at + 1

    def _scan_scalar(self, text: str, at: int, final: bool) -> int:
        end = _end(_WORD, text, at)
        if end == len(text) and end - at <= _MAX_WORD and end > at and not final:
            return at
        if end - at > _MAX_WORD or not _SCALAR.fullmatch(text, at, end):
            self._state = "failed"
            return at
        self._state = self._after_value()
        return end

    def _open(self, char: str) -> None:
        if len(self._stack) == MAX_DEPTH:
            self._state = "failed"
        else:
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first value"

    def _close(self) -> _State:
        self._stack.pop()
        return self._after_value()

    def _after_value(self) -> _State:
        return "next" if self._stack else "done"


def is_json(text: str) -> bool:
    """Return True if the text is one JSON value without whitespace around it."""
    scanner = JsonScanner()
    return scanner.scan(text, final=True) == len(text) and scanner.complete and text.strip() == text


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match of a pattern that also matches nothing."""
    match = pattern.match(text, at)
    return match.end() if match else at
