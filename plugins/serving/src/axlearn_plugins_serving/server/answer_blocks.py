"""`AnswerBlocks`: an answer as a sequence of blocks of reasoning, text and tool calls."""

import os
from collections.abc import Iterable
from typing import Any, Literal

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

    def add(self, pieces: Iterable[Piece]) -> list[Change]:
        """Append pieces of the answer. Return the changes in order."""
        changes: list[Change] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._begin(Block("call", len(self.blocks), piece.name, piece.id or new_call_id()), changes)
                continue
            kind: Kind = (
                "call" if isinstance(piece, CallArguments) else "reasoning" if isinstance(piece, Reasoning) else "text"
            )
            if self._open is None or self._open.kind != kind:
                self._begin(Block(kind, len(self.blocks)), changes)
            assert self._open is not None
            self._open.parts.append(piece.text)
            changes.append(Change("extend", self._open, piece.text))
        return changes

    def end(self) -> list[Change]:
        """End the answer, and return the changes. An answer without blocks gets an empty text."""
        changes: list[Change] = []
        if not self.blocks:
            self._begin(Block("text", 0), changes)
        self._close(changes)
        return changes

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the chat API."""
        text, reasoning = self.join("text"), self.join("reasoning")
        fields: dict[str, Any] = {"role": "assistant", "content": text}
        if calls := self.tool_calls:
            fields |= {"content": text or None, "tool_calls": calls}
        if reasoning:
            fields["reasoning_content"] = reasoning
        return fields

    def join(self, kind: Kind) -> str:
        """Return the joined text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls, in the form of the chat API."""
        return [
            {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in self.blocks
            if block.kind == "call"
        ]

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        self.blocks.append(block)
        self._open = block
        changes.append(Change("open", block))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("close", self._open))
            self._open = None
