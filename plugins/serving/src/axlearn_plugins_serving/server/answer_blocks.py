"""`AnswerBlocks`: an answer as a sequence of blocks of reasoning, text and tool calls."""

import os
from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from axlearn_plugins_serving.parsers.answer_formats import CallArguments, CallStart, Piece, Reasoning
from axlearn_plugins_serving.server.prompt_job import ScoredToken

Kind = Literal["reasoning", "text", "call"]


def new_call_id() -> str:
    """Return a unique id of a tool call."""
    return f"call_{os.urandom(12).hex()}"


@attrs.define(eq=False)
class Block:
    """A part of an answer.

    Attributes:
        kind: Kind of the block.
        index: Number of the block in the answer.
        parts: Parts of the text, or of the arguments of a call as JSON text.
        name: Name of the tool that is called.
        call_id: Id of the call.
        scored: Log-probabilities of the tokens of a text, if requested.
    """

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    parts: list[str] = attrs.field(factory=list)
    scored: list[ScoredToken] = attrs.field(factory=list)

    @property
    def text(self) -> str:
        """The joined parts."""
        return "".join(self.parts)


@attrs.frozen
class Change:
    """A change of a block: it was opened, extended by `text`, or closed.

    Attributes:
        kind: Kind of the change.
        block: The block.
        text: The new text.
        scored: Log-probabilities of the tokens of the new text, if requested.
    """

    kind: Literal["open", "extend", "close"]
    block: Block
    text: str = ""
    scored: tuple[ScoredToken, ...] = ()


class AnswerBlocks:
    """The blocks of an answer.

    Attributes:
        blocks: The blocks so far.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def add(self, pieces: Iterable[Piece]) -> Iterator[Change]:
        """Append pieces of the answer. Yield the changes in order."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                yield from self._begin(Block("call", len(self.blocks), piece.name, piece.id or new_call_id()))
                continue
            kind: Kind = (
                "call" if isinstance(piece, CallArguments) else "reasoning" if isinstance(piece, Reasoning) else "text"
            )
            if self._open is None or self._open.kind != kind:
                yield from self._begin(Block(kind, len(self.blocks)))
            assert self._open is not None
            self._open.parts.append(piece.text)
            yield Change("extend", self._open, piece.text)

    def end(self) -> Iterator[Change]:
        """End the answer. An answer without blocks gets an empty text."""
        if not self.blocks:
            yield from self._begin(Block("text", 0))
        if self._open is not None:
            yield Change("close", self._open)
            self._open = None

    def join(self, kind: Kind) -> str:
        """Return the joined text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """The tool calls."""
        return [block for block in self.blocks if block.kind == "call"]

    def _begin(self, block: Block) -> Iterator[Change]:
        if self._open is not None:
            yield Change("close", self._open)
        self.blocks.append(block)
        self._open = block
        yield Change("open", block)
