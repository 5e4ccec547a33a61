"""Answers of the policy as messages."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from axlearn_plugins_rl.rollout_contracts import Completion
from axlearn_plugins_serving.parsers.answer_formats import CallStart, Function, Parser, Piece
from axlearn_plugins_serving.server.answer_blocks import AnswerBlocks
from axlearn_plugins_serving.server.answer_reader import AnswerFormats, AnswerReader
from axlearn_plugins_serving.server.conversation import ToolUse
from axlearn_plugins_transformer.text.decoding import OutputOptions
from axlearn_plugins_transformer.text.processor import TextProcessor


@attrs.frozen(kw_only=True)
class NumberedReader(AnswerReader):
    """An `AnswerReader` that gives equal rollouts equal call ids.

    Servers choose random ids. Templates may show them to the model, so a rollout with random ids could not be repeated.

    Attributes:
        numbers: Numbers for the parsers of a rollout.
    """

    numbers: Iterator[int] = attrs.field(factory=itertools.count)

    @classmethod
    def wrap(cls, reader: AnswerReader, numbers: Iterator[int]) -> "NumberedReader":
        """Return a reader with the same formats and tools."""
        return cls(**attrs.asdict(reader, recurse=False), numbers=numbers)

    def new_parser(self) -> Parser | None:
        """See `AnswerReader.new_parser`."""
        parser = super().new_parser()
        return None if parser is None else _NumberCalls(parser, next(self.numbers))


class _NumberCalls:
    """A parser that replaces ids that the model did not write."""

    def __init__(self, parser: Parser, number: int):
        self._parser, self._number, self._text = parser, number, ""

    def push(self, text: str) -> list[Piece]:
        """See `Parser.push`."""
        self._text += text
        return self._replace(self._parser.push(text))

    def end(self) -> list[Piece]:
        """See `Parser.end`."""
        return self._replace(self._parser.end())

    def _replace(self, pieces: Iterable[Piece]) -> list[Piece]:
        return [self._with_id(piece) if isinstance(piece, CallStart) else piece for piece in pieces]

    def _with_id(self, piece: CallStart) -> CallStart:
        if piece.id is not None and piece.id in self._text:
            return piece
        digest = hashlib.blake2b(f"{self._number}/{piece.index}".encode(), digest_size=5).hexdigest()
        return attrs.evolve(piece, id=digest[:9])  # nine letters and digits, which the templates of Mistral require


def new_reader(
    formats: AnswerFormats, tools: Sequence[Mapping[str, Any]], prompt: str, numbers: Iterator[int]
) -> NumberedReader:
    """Return the reader of the answers to a conversation.

    Args:
        formats: Formats of the model.
        tools: Descriptions of the functions that the model may call.
        prompt: The rendered conversation.
        numbers: See `NumberedReader`.
    """
    functions = tuple(
        Function(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in map(_nested, tools)
    )
    use = ToolUse(tools=tuple(tools), functions=functions, mode="auto") if tools else ToolUse()
    return NumberedReader(formats=formats, use=use, prompt=prompt, numbers=numbers)


def read_answer(
    reader: AnswerReader, text: TextProcessor, context: Sequence[int], completion: Completion, stop: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the message of a completion: its content, its reasoning and its tool calls.

    Args:
        reader: Reader of the answers.
        text: Text processor of the policy.
        context: Tokens before the completion.
        completion: The completion.
        stop: Texts that end the completion.
    """
    options = OutputOptions(stops=tuple(stop), spelled=frozenset(reader.special_tokens))
    output, tokens = text.output(context, options), [int(token) for token in completion.segment.tokens]
    if completion.finish == "stop" and tokens and tokens[-1] in text.end_tokens:
        tokens.pop()
    written = "".join([*map(output.push, tokens), output.end()])
    parser, blocks = reader.new_parser(), AnswerBlocks()
    if parser is None:
        return {"role": "assistant", "content": written}
    blocks.add([*parser.push(written), *parser.end()])
    return blocks.message


def _nested(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool if "function" in tool else {"function": tool}
