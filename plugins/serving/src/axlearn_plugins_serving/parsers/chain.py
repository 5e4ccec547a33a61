"""`Chain`: a parser that passes the text of one parser to the next."""

from collections.abc import Sequence

from axlearn_plugins_serving.parsers.answer_formats import Parser, Piece, Text


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
