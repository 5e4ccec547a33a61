"""Conformance suites for the formats of tool calls and reasoning.

They write random outputs in a format, and parse them in pieces of different sizes.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import pytest

from axlearn_plugins_serving.parsers.answer_formats import (
    CallArguments,
    CallStart,
    Function,
    Parser,
    Piece,
    Reasoning,
    ReasoningFormat,
    Text,
    ToolFormat,
)

_WORDS = (
    "a",
    "Zürich",
    "東京",
    "😀",
    "👩‍👩‍👧",
    '"',
    "'",
    "\\",
    "\n",
    "\t",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "<",
    ">",
    "|",
    "`",
    "5",
    "true",
)
_WORDS += ("\\n", "\\u00e9", "</", "null", " ", "  ", "x = 1", "; ", "=", "(", ")", "&amp;", "\u2028", "\u0000")
_TEXTS = (
    "Let me look that up.",
    "Sure!\n",
    "  indented",
    "1 < 2 and {3}",
    "✓ 😀\n\n- item\n",
    "[1] says \"no\" | 'yes'",
)
_NOISE = "{}[]<>|\"'\\:,() \nabc0_=-/😀"
_SECONDS = 20.0
"""Time for a megabyte of text. Parsers whose time is not linear in the length need minutes."""


@attrs.frozen
class Call:
    """A tool call.

    Attributes:
        name: Name of the function.
        arguments: The arguments.
    """

    name: str
    arguments: dict[str, Any]


@attrs.frozen
class Answer:
    """The pieces of an output, put together.

    Attributes:
        parts: Text and calls in order. The arguments of a call are JSON text.
        reasoning: The reasoning.
    """

    parts: tuple[str | tuple[str, str], ...]
    reasoning: str = ""

    @property
    def text(self) -> str:
        """The text without the calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Names and arguments of the calls."""
        return [part for part in self.parts if isinstance(part, tuple)]


def parse(parser: Parser, output: str, sizes: Iterator[int]) -> Answer:
    """Parse an output in pieces.

    Args:
        parser: The parser.
        output: The output.
        sizes: Lengths of the pieces.

    Returns:
        The pieces, put together. The function checks the order of the pieces.
    """
    pieces: list[Piece] = []
    at = 0
    while at < len(output):
        size = next(sizes)
        pieces += parser.push(output[at : at + size])
        at += size
    return join(pieces + parser.end())


def join(pieces: Sequence[Piece]) -> Answer:
    """Put the pieces of an output together, and check their order."""
    parts: list[str | tuple[str, str]] = []
    reasoning, calls = "", 0
    for piece in pieces:
        if isinstance(piece, Reasoning):
            reasoning += piece.text
        elif isinstance(piece, Text):
            before = parts.pop() if parts and isinstance(parts[-1], str) else ""
            parts.append(f"{before}{piece.text}")
        elif isinstance(piece, CallStart):
            assert piece.index == calls, f"call {calls} has the index {piece.index}"
            calls += 1
            parts.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            assert piece.index == calls - 1, f"arguments of call {piece.index} follow the start of call {calls - 1}"
            last = parts[-1]
            assert isinstance(last, tuple), "arguments of a call follow text"
            parts[-1] = (last[0], last[1] + piece.text)
    return Answer(tuple(parts), reasoning)


def random_sizes(rng: random.Random) -> Iterator[int]:
    """Return random lengths of pieces."""
    while True:
        yield rng.choice((1, 2, 3, 5, 8, 13, 60))


def constant_sizes(size: int) -> Iterator[int]:
    """Return the same length for each piece."""
    while True:
        yield size


class _Generator:
    """Generates calls.

    Args:
        rng: Source of randomness.
        words: Additional strings to use in arguments.
        forbidden: Strings that arguments cannot contain.
    """

    def __init__(self, rng: random.Random, words: Sequence[str], forbidden: Sequence[str]):
        self._rng, self._words, self._forbidden = rng, (*_WORDS, *words), forbidden

    def string(self) -> str:
        text = "".join(self._rng.choice(self._words) for _ in range(self._rng.randrange(8)))
        return "forbidden" if any(part in text for part in self._forbidden) else text

    def value(self, depth: int = 0) -> Any:
        kind = self._rng.randrange(5 if depth > 2 else 8)
        if kind < 2:
            return self.string()
        if kind < 5:
            return self._rng.choice((None, True, False, 0, -7, 12345678901234567890, 0.5, -1.5e-9, 1e30))
        count = self._rng.randrange(4)
        if kind == 5:
            return [self.value(depth + 1) for _ in range(count)]
        return {self.key(): self.value(depth + 1) for _ in range(count)}

    def key(self) -> str:
        return self._rng.choice(("city", "größe", "x_1", "type", "name", "arguments", "b"))

    def call(self, name: str) -> Call:
        return Call(name, {self.key(): self.value() for _ in range(self._rng.randrange(5))})


def _schema(value: Any) -> dict[str, Any]:
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": types.get(type(value), "null")}


def offer(calls: Sequence[Call]) -> list[Function]:
    """Return functions that accept the calls."""
    properties: dict[str, dict[str, Any]] = {call.name: {} for call in calls}
    for call in calls:
        properties[call.name] |= {key: _schema(value) for key, value in call.arguments.items()}
    return [Function(name, {"type": "object", "properties": schemas}) for name, schemas in properties.items()]


class ToolFormatSuite:
    """Conformance tests for a format of tool calls.

    Attributes:
        format: The format.
        cases: Number of random outputs for each test.
        forbidden: Strings that arguments cannot contain, such as the closing tags of arguments without quotes.
        words: Additional strings to use in arguments. The special tokens of the format are used too.
        text_before: Whether text may precede calls.
        text_after: Whether text may follow calls.
        keeps_text: Whether text without calls is returned unchanged. It is not if all text has markers.
    """

    format: ToolFormat
    cases: int = 40
    forbidden: ClassVar[Sequence[str]] = ()
    words: ClassVar[Sequence[str]] = ()
    text_before: bool = True
    text_after: bool = True
    keeps_text: bool = True

    def write(self, calls: Sequence[Call], rng: random.Random) -> str:
        """Write calls in the syntax of the format.

        Args:
            calls: The calls.
            rng: Chooses between spellings that mean the same.
        """
        raise NotImplementedError

    def write_text(self, text: str) -> str:
        """Write text of the answer in the syntax of the format."""
        return text

    def _outputs(self) -> Iterator[tuple[random.Random, list[Call], str, str, str]]:
        for seed in range(self.cases):
            rng = random.Random(seed)
            generator = _Generator(rng, (*self.words, *self.format.special_tokens), self.forbidden)
            # Each call has a function of its own, so that its schema fits its arguments.
            calls = [
                generator.call(f"{rng.choice(('get_weather', 'f', 'search-web'))}_{i}")
                for i in range(rng.randint(1, 3))
            ]
            before = rng.choice(("", *_TEXTS)) if self.text_before else ""
            after = rng.choice(("", *_TEXTS)) if self.text_after else ""
            written = [self.write_text(before) if before else "", self.write(calls, rng)]
            yield rng, calls, before, after, "".join([*written, self.write_text(after) if after else ""])

    def _splits(self, rng: random.Random, output: str) -> list[Iterator[int]]:
        return [constant_sizes(len(output) or 1), constant_sizes(1), random_sizes(rng)]

    def test_calls_and_text_are_parsed_exactly(self) -> None:
        """Parse random calls with text around them."""
        for rng, calls, before, after, output in self._outputs():
            for stream in (False, True):
                for sizes in self._splits(rng, output):
                    answer = parse(self.format.new(offer(calls), stream=stream), output, sizes)
                    parsed = [
                        part if isinstance(part, str) else Call(part[0], json.loads(part[1])) for part in answer.parts
                    ]
                    assert parsed == [part for part in (before, *calls, after) if part], (
                        f"parsed {answer} from {output!r}"
                    )

    def test_malformed_calls_raise_nothing(self) -> None:
        """Parse outputs that were changed at random."""
        for rng, calls, _, _, output in self._outputs():
            changed = _damage(output, rng)
            for stream in (False, True):
                answers = [
                    parse(self.format.new(offer(calls), stream=stream), changed, sizes)
                    for sizes in self._splits(rng, changed)
                ]
                assert answers[1:] == answers[:-1], f"the answers depend on the pieces of {changed!r}"
                assert {name for name, _ in answers[0].calls} <= {call.name for call in calls}
                if not stream:
                    assert all(isinstance(json.loads(arguments), dict) for _, arguments in answers[0].calls)

    def test_calls_of_other_functions_stay_text(self) -> None:
        """Parse calls without offering functions."""
        for rng, _, _, _, output in self._outputs():
            for stream in (False, True):
                answer = parse(self.format.new([], stream=stream), output, random_sizes(rng))
                assert not answer.calls, f"functions that were not offered are called: {answer.calls}"
                assert not self.keeps_text or answer.text == output

    def test_text_without_calls_is_unchanged(self) -> None:
        """Parse text."""
        for text in (*_TEXTS, "", "\n", " {", "\n\n[", *(token[:-1] for token in self.format.special_tokens)):
            answer = parse(self.format.new([Function("f")], stream=True), self.write_text(text), constant_sizes(1))
            assert answer.text == text

    def test_arguments_are_returned_while_they_are_written(self) -> None:
        """Stop before the end of a long argument."""
        call = Call("f", {"text": "word " * 200})
        output, parser = self.write([call], random.Random(0)), self.format.new(offer([call]), stream=True)
        half = join(parser.push(output[: len(output) // 2]))
        assert half.calls, f"half of the output was parsed as {half}"
        assert "word word" in half.calls[0][1], f"half of the output was parsed as {half}"

    def test_long_and_nested_output_is_parsed_in_time(self) -> None:
        """Parse a megabyte of repeated markers, and deeply nested calls."""
        deep: Any = "x"
        for _ in range(80):
            deep = [deep]
        call = Call("f", {"a": deep})
        output = self.write([call], random.Random(0))
        answer = parse(self.format.new(offer([call]), stream=False), output, constant_sizes(len(output)))
        assert [json.loads(arguments) for _, arguments in answer.calls] == [call.arguments]
        cut = output.index("[[[[")
        hostile = [output[:cut] + bracket * 500_000 for bracket in ("[", "{", "(", '{"a":', '"', "-", "[1,")]
        hostile += [token[:-1] * (500_000 // len(token)) for token in self.format.special_tokens]
        for text in hostile:
            begin = time.process_time()
            parse(self.format.new(offer([call]), stream=False), text, constant_sizes(1000))
            seconds = time.process_time() - begin
            assert seconds < _SECONDS, f"{seconds:.0f} s for {len(text)} characters that begin with {text[:200]!r}"


def _damage(output: str, rng: random.Random) -> str:
    """Change an output at random."""
    chars = list(output)
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.randrange(5), rng.randrange(len(chars) + 1)
        end = min(len(chars), at + rng.randint(1, 10))
        if kind == 0:
            del chars[at:]
        elif kind == 1:
            del chars[at:end]
        elif kind == 2:
            chars[at:end] = reversed(chars[at:end])
        elif kind == 3:
            chars[at:at] = (rng.choice(_NOISE) for _ in range(rng.randint(1, 10)))
        else:
            chars[at:at] = chars[rng.randrange(len(chars) + 1) :]
    return "".join(chars)


class ReasoningFormatSuite:
    """Conformance tests for a format of reasoning.

    Attributes:
        format: The format.
        prompt: A prompt after which the model writes its reasoning with all markers.
        prompt_inside: A prompt that ends inside of the reasoning, or None if the family has no such prompts.
        prompt_without: A prompt after which the model does not reason, or None if the family has no such prompts.
    """

    format: ReasoningFormat
    prompt: str = ""
    prompt_inside: str | None = None
    prompt_without: str | None = None

    def write(self, reasoning: str, text: str, *, inside: bool) -> str:
        """Write an output.

        Args:
            reasoning: The reasoning.
            text: The answer.
            inside: Whether the prompt contains the beginning of the reasoning.
        """
        raise NotImplementedError

    def write_text(self, text: str) -> str:
        """Write an answer without reasoning."""
        return text

    def _parse(self, prompt: str, output: str) -> Answer:
        answers = [parse(self.format.new(prompt), output, constant_sizes(size)) for size in (1, 7, len(output) or 1)]
        assert answers[1:] == answers[:-1], f"the answers depend on the pieces of {output!r}"
        assert not answers[0].calls
        return answers[0]

    @pytest.mark.parametrize("text", _TEXTS)
    def test_reasoning_and_answer_are_separated(self, text: str) -> None:
        """Parse outputs with reasoning."""
        reasoning = "First, 1 < 2.\n\nSo <b>it</b> {\"is\": 'true'} 😀."
        prompts = [(self.prompt, False), (self.prompt_inside, True)]
        for prompt, inside in prompts:
            if prompt is not None:
                answer = self._parse(prompt, self.write(reasoning, text, inside=inside))
                assert (answer.reasoning, answer.text) == (reasoning, self.write_text(text))

    def test_truncated_reasoning_is_reasoning(self) -> None:
        """End the output inside of the reasoning."""
        output = self.write("Let me think about this problem.", "done", inside=False)
        answer = self._parse(self.prompt, output[: output.index(" problem")])
        assert (answer.reasoning, answer.text) == ("Let me think about this", "")

    @pytest.mark.parametrize("text", _TEXTS)
    def test_an_answer_without_reasoning_is_text(self, text: str) -> None:
        """Parse outputs without reasoning."""
        for prompt in (self.prompt, self.prompt_without):
            if prompt is not None:
                answer = self._parse(prompt, self.write_text(text))
                assert (answer.reasoning, answer.text) == ("", self.write_text(text))
