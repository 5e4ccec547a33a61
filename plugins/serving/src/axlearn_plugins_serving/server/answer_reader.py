"""`AnswerReader`: splits the answers to a conversation into reasoning, text and tool calls."""

from collections.abc import Callable, Collection

import attrs

from axlearn_plugins_serving.parsers.answer_formats import Parser, ReasoningFormat, ToolFormat
from axlearn_plugins_serving.parsers.chain import Chain, FirstCall
from axlearn_plugins_serving.parsers.selection import NONE, choose_reasoning_format, choose_tool_format
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.conversation import Conversation, ToolUse
from axlearn_plugins_serving.server.forced_calls import ForcedCallParser
from axlearn_plugins_serving.server.staged_constraint import Stages
from axlearn_plugins_transformer.text.processor import TextProcessor


@attrs.frozen
class AnswerFormats:
    """The formats in which a model writes tool calls and reasoning.

    Attributes:
        tools: Format of tool calls, or None if it is unknown or not parsed.
        reasoning: Format of the reasoning, or None if the model does not reason or it is not parsed.
        leaves_calls: Whether tool calls are returned as text (`--tool-parser none`).
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    leaves_calls: bool = False


def choose_formats(text: TextProcessor, tool_parser: str | None, reasoning_parser: str | None) -> AnswerFormats:
    """Return the formats of a model.

    Args:
        text: Text processor of the model.
        tool_parser: Name of the format of tool calls. None chooses it by the chat template; `none` does not parse calls.
        reasoning_parser: Name of the format of the reasoning, as for `tool_parser`.

    Raises:
        RequestError: If a name is unknown, or if several formats match the template.
    """
    template = text.template.source if text.has_template else None
    return AnswerFormats(
        choose_tool_format(template, tool_parser),
        choose_reasoning_format(template, reasoning_parser),
        leaves_calls=tool_parser == NONE,
    )


@attrs.frozen(kw_only=True)
class AnswerReader:
    """Reads the answers to one conversation.

    Attributes:
        formats: Formats of the model.
        use: Tools of the request.
        prompt: The rendered conversation.
        stream: Whether the client reads the answer as a stream.
        budget: Maximum number of tokens of the reasoning.
    """

    formats: AnswerFormats
    use: ToolUse = ToolUse()
    prompt: str = ""
    stream: bool = False
    budget: int | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Spellings of special tokens that the parsers read."""
        formats = (self._tools, self.formats.reasoning)
        return tuple(token for each in formats if each is not None for token in each.special_tokens)

    def new_parser(self) -> Parser | None:
        """Return a parser for one answer, or None if its text is returned as it is."""
        parsers: list[Parser] = []
        if self.formats.reasoning is not None:
            parsers.append(self.formats.reasoning.new(self.prompt))
        if self._tools is not None:
            functions = self.use.functions if self.use.mode == "auto" else ()
            parsers.append(self._tools.new(functions, stream=self.stream))
        if self.use.mode == "required":
            parsers.append(ForcedCallParser(self.use))
        parser = Chain(parsers) if parsers else None
        return FirstCall(parser) if parser is not None and not self.use.parallel else parser

    def stages(self, encode: Callable[[str], list[int]], ends: Collection[int], *, has_grammar: bool) -> Stages | None:
        """Return the parts of an answer that a grammar leaves free, or None if there are none.

        Args:
            encode: Encodes the spelling of a marker.
            ends: Tokens that end an output.
            has_grammar: Whether the answer must match a grammar.
        """
        reasoning, tools = self.formats.reasoning, self._tools
        call = tools.call_start() if tools is not None and self.use.mode == "auto" else ""
        call_tokens = tuple(encode(call)) if call else ()
        if reasoning is None or not (has_grammar or self.budget is not None):
            return Stages(call=call_tokens) if has_grammar and call_tokens else None
        end = self.prompt.rstrip()
        return Stages(
            reasons=reasoning.is_inside(self.prompt),
            opening=() if end.endswith(reasoning.stop) else tuple(encode(reasoning.opening or reasoning.start)),
            closing=tuple(encode(reasoning.closing or reasoning.stop)),
            ending=tuple(encode(reasoning.ending or reasoning.stop)),
            budget=self.budget,
            call=call_tokens,
            ends=tuple(sorted(ends)) if has_grammar else (),
        )

    @property
    def _tools(self) -> ToolFormat | None:
        if self.use.mode == "auto" or (self.formats.tools is not None and self.formats.tools.frames_text):
            return self.formats.tools
        return None


def new_reader(formats: AnswerFormats, conversation: Conversation, prompt: str, *, stream: bool) -> AnswerReader:
    """Return the reader of the answers to a conversation.

    Args:
        formats: Formats of the model.
        conversation: The conversation.
        prompt: Its text.
        stream: Whether the client reads the answer as a stream.

    Raises:
        ApiError: 400 if the request needs a format that is unknown.
    """
    if conversation.use.mode == "auto" and formats.tools is None and not formats.leaves_calls:
        message = (
            "tools: the server does not know in which format this model calls tools; set tool_choice to required, or start the "
            "server with --tool-parser NAME, or with --tool-parser none to get calls as text"
        )
        raise ApiError(400, message, param="tools", code="no_tool_parser")
    if conversation.budget is not None and formats.reasoning is None:
        message = "the server does not know how this model reasons; start it with --reasoning-parser NAME"
        raise ApiError(400, message, param="thinking_token_budget", code="no_reasoning_parser")
    return AnswerReader(formats=formats, use=conversation.use, prompt=prompt, stream=stream, budget=conversation.budget)
