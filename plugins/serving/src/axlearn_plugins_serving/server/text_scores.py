"""`TextScores`: finds the log-probabilities of the text of an answer."""

import attrs

from axlearn_plugins_serving.parsers.answer_formats import Piece, Reasoning, Text
from axlearn_plugins_serving.server.prompt_job import Delta, ScoredToken


@attrs.define
class TextScores:
    """Assigns scored tokens to the pieces of text that a parser returns.

    A parser returns text later than the model writes it, and drops markers and blank text. So this class looks for each piece in
    the output of the model.
    """

    _parts: list[str] = attrs.field(factory=list)
    """Output after the last piece."""
    _start: int = 0
    """Number of characters before this output."""
    _scored: list[ScoredToken] = attrs.field(factory=list)

    def add(self, delta: Delta) -> None:
        """Add new output. Call `take` with each of its pieces next."""
        self._parts.append(delta.text)
        self._scored += delta.scored

    def take(self, piece: Piece) -> tuple[ScoredToken, ...]:
        """Return the tokens of a piece of text. Other pieces have none.

        A token belongs to the first piece that contains a part of it. A token that ends before the piece is dropped, because it is
        a part of a marker, of the reasoning or of a call.
        """
        if not isinstance(piece, Text | Reasoning) or not piece.text:
            return ()
        output = "".join(self._parts)
        # Markers may stand before the piece. The text after it was held back by the parser, and is short.
        begin = 0 if output.startswith(piece.text) else output.rfind(piece.text)
        end = begin + len(piece.text)
        if begin < 0:  # the parser changed the text
            begin, end = 0, len(output)
        first, last = self._start + begin, self._start + end
        ends = [*(token.offset for token in self._scored[1:]), self._start + len(output)]
        self._parts, self._start = [output[end:]], last
        ahead = [t for t, token_end in zip(self._scored, ends, strict=False) if t.offset >= first or token_end > first]
        if isinstance(piece, Reasoning):
            self._scored = ahead
            return ()
        count = sum(token.offset < last for token in ahead)
        self._scored = ahead[count:]
        return tuple(ahead[:count])
