"""Interfaces of the parsers that split an output into reasoning, text and tool calls.

Each family of models writes reasoning and tool calls in its own syntax. A `ReasoningFormat` or `ToolFormat` describes one syntax
and creates a parser for each output. Plugins register formats as the entry points `axlearn.reasoning_parsers` and
`axlearn.tool_parsers`. Parsers receive an output in pieces of any size, so they hold back text that may be the beginning of a
marker. This module does not import JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs


@attrs.frozen
class Text:
    """Text of the answer."""

    text: str


@attrs.frozen
class Reasoning:
    """Text of the reasoning that precedes the answer."""

    text: str


@attrs.frozen
class CallStart:
    """The beginning of a tool call. `CallArguments` pieces with the same index follow.

    Attributes:
        index: Number of the call in the output, from 0.
        name: Name of the tool.
        id: Id of the call, if the model wrote one or its template requires a special form. None lets the server choose.
    """

    index: int
    name: str
    id: str | None = None


@attrs.frozen
class CallArguments:
    """A piece of the arguments of a call. The pieces of a call join to one JSON object.

    Attributes:
        index: Number of the call in the output, from 0.
        text: A piece of JSON text.
    """

    index: int
    text: str


Piece = Text | Reasoning | CallStart | CallArguments


@attrs.frozen
class Function:
    """A tool that the request offers.

    Attributes:
        name: Name of the function.
        parameters: JSON schema of its arguments. Formats that write arguments as plain text need it to choose between a
            string and another JSON value.
        path: Path of the schema in the request, for errors.
    """

    name: str
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    path: str = attrs.field(default="tools", eq=False)


class Parser(Protocol):
    """Splits one output into pieces."""

    def push(self, text: str) -> list[Piece]:
        """Append text to the output. Return the pieces that can no longer change."""
        ...

    def end(self) -> list[Piece]:
        """End the output. Return the remaining pieces."""
        ...


class ReasoningFormat:
    """The syntax in which a model writes its reasoning.

    Subclasses set the attributes and implement `new`.

    Attributes:
        special_tokens: Spellings of special tokens that the parser reads. Other special tokens are left out of the output.
        start: Text that begins the reasoning, such as `<think>`.
        stop: Text that ends the reasoning, such as `</think>`.
        opening: Text that begins an output that does not start with the answer. None stands for `start`.
        closing: Text after which the answer begins. None stands for `stop`. Constraints of the output apply after it.
        ending: Text that ends the reasoning and begins the answer, for reasoning that is too long. None stands for `stop`.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    start: ClassVar[str] = ""
    stop: ClassVar[str] = ""
    opening: ClassVar[str | None] = None
    closing: ClassVar[str | None] = None
    ending: ClassVar[str | None] = None

    def matches(self, template: str) -> bool:
        """Return True if models with this chat template reason in this format."""
        raise NotImplementedError

    def is_inside(self, prompt: str) -> bool:
        """Return True if the output that follows `prompt` begins inside of the reasoning."""
        return bool(self.start) and prompt.rstrip().endswith(self.start.rstrip())

    def new(self, prompt: str) -> Parser:
        """Return a parser for the output that follows `prompt`.

        The parser returns only `Reasoning` and `Text`.

        Args:
            prompt: The rendered conversation. It may end inside of the reasoning.
        """
        raise NotImplementedError


class ToolFormat:
    """The syntax in which a model calls tools.

    Subclasses set the attributes and implement `new`.

    Attributes:
        special_tokens: Spellings of special tokens that the parser reads. Other special tokens are left out of the output.
        frames_text: Whether the model also frames its text, so that the parser must read every answer (Harmony).
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    frames_text: ClassVar[bool] = False

    def matches(self, template: str) -> bool:
        """Return True if models with this chat template call tools in this format."""
        raise NotImplementedError

    def call_start(self) -> str:
        """Return the text that begins the first call, such as `<tool_call>`, or an empty string if there is no such text.

        If a request offers tools and asks for JSON, the model may begin a call instead of the JSON.
        """
        return ""

    def new(self, functions: Sequence[Function], *, stream: bool) -> Parser:
        """Return a parser for an output, without its reasoning.

        A call that is malformed, or that names another function, stays text.

        Args:
            functions: The tools that the request offers.
            stream: Whether to return the arguments of a call while they are written. If so, text after the first error in the
                arguments is returned as `Text`, since the beginning of the call cannot be taken back.
        """
        raise NotImplementedError
