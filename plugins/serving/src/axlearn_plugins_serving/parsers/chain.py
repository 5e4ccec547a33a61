"""Parsers that combine and limit other parsers."""

from collections.abc import Sequence

from axlearn_plugins_serving.parsers.answer_formats import CallArguments, CallStart, Parser, Piece, Text


class Chain:
    """A parser that runs parsers one after another.

    Each parser reads the `Text` pieces of the previous one. Other pieces pass through.

    Args:
        parsers: Parsers, in the order in which they run.
    """

    def __init__(self, parsers: Sequence[Parser]):
        self._parsers = tuple(parsers)

    def push(self, text: str) -> list[Piece]:
        """See `Parser.push`."""
        return self._pass([Text(text)], 0)

    def end(self) -> list[Piece]:
        """See `Parser.end`."""
        pieces: list[Piece] = []
        for i, parser in enumerate(self._parsers):
            pieces += self._pass(parser.end(), i + 1)
        return pieces

    def _pass(self, pieces: Sequence[Piece], first: int) -> list[Piece]:
        for parser in self._parsers[first:]:
            passed: list[Piece] = []
            for piece in pieces:
                passed += parser.push(piece.text) if isinstance(piece, Text) else [piece]
            pieces = passed
        return [piece for piece in pieces if not isinstance(piece, Text) or piece.text]


class FirstCall:
    """A parser that leaves out the calls after the first one, for requests that allow only one.

    Args:
        parser: Parser of the output.
    """

    def __init__(self, parser: Parser):
        self._parser = parser

    def push(self, text: str) -> list[Piece]:
        """See `Parser.push`."""
        return self._select(self._parser.push(text))

    def end(self) -> list[Piece]:
        """See `Parser.end`."""
        return self._select(self._parser.end())

    def _select(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if not isinstance(piece, CallStart | CallArguments) or piece.index == 0]
