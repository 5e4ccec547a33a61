"""Constraints for JSON output, with or without a schema, based on llguidance."""

import functools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from axlearn_core.contracts.parts import Tokenizer
from axlearn_plugins_serving.parsers.answer_formats import Function
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.conversation import ToolUse
from axlearn_plugins_serving.server.forced_calls import forced_grammar
from axlearn_plugins_serving.server.grammar_constraint import GrammarConstraint, GrammarTooAmbiguousError
from axlearn_plugins_serving.server.staged_constraint import StagedConstraint, Stages
from axlearn_plugins_serving.server.structured_outputs import JSON_OPTIONS, GrammarSource
from axlearn_plugins_transformer.text.decoding import HasTokenizerJson
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

_LIMITS = LLParserLimits(max_items_in_row=200, step_max_items=5_000, step_lexer_fuel=100_000)
"""Limits on the work for one token, so that an ambiguous grammar fails instead of delaying other requests."""
_JSON_LIMITS = LLParserLimits(max_items_in_row=2_000, step_max_items=5_000, step_lexer_fuel=100_000)
"""Limits for JSON schemas. An optional property takes four items of a row. Brackets delimit the values, so the work for a token
grows only linearly with the items."""
_CALLS = "calls"
"""Name of the grammar of required calls, which has the limits of JSON schemas."""


_REMOTE = re.compile(r"Resource '(.{1,200}?)' is not present in a registry")
"""llguidance's error for a reference to a schema elsewhere."""


class _Vocabulary:
    """A tokenizer in the form that llguidance expects: the bytes of each token."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.special_token_ids = [tokenizer.eos_id]
        if isinstance(tokenizer, ByteTokenizer):
            tokens = [bytes([i]) for i in range(256)]
        else:
            tokens = [tokenizer.decode([i]).encode() for i in range(tokenizer.vocab_size)]
        tokens += [b""] * (tokenizer.vocab_size - len(tokens))
        tokens[tokenizer.eos_id] = b"<|end|>"
        self.tokens: Sequence[bytes] = tokens

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class Grammars:
    """Builds constraints for a tokenizer. The vocabulary is read on first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token.

        For special tokens, returns their spelling. For unused ids, returns no bytes.
        """
        if token >= self._tokenizer.vocab_size:
            return b""
        raw = self._vocabulary.decode_bytes([token])
        return raw[1:] if raw[:1] == b"\xff" and self._vocabulary.is_special_token(token) else raw

    def new(self, schema: Mapping[str, Any] | None, *, param: str = "response_format") -> GrammarConstraint:
        """Build a constraint for JSON that matches `schema`. If it is None, any object is allowed.

        This can take a second, so call it in a thread.

        Args:
            schema: JSON schema, or None.
            param: Path of the field that contains it.

        Raises:
            ApiError: 400 if the schema is invalid, unsupported or unsatisfiable.
        """
        text = json.dumps({"type": "object"} if schema is None else schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        except ValueError as error:
            raise _grammar_error(str(error), param) from None
        return self.constrain(grammar, param=param)

    def rebuild(self, text: str) -> GrammarConstraint | StagedConstraint:
        """Build a constraint from the `grammar` of a constraint in another process."""
        fields = json.loads(text)
        if "stages" not in fields:
            return self.constrain(text)
        inner = None if fields["grammar"] is None else self.constrain(fields["grammar"])
        return self.stage(Stages.from_json(fields["stages"]), inner)

    def stage(self, stages: Stages, grammar: GrammarConstraint | None) -> StagedConstraint:
        """Build a constraint that applies a grammar to the answer only."""
        return StagedConstraint(stages, grammar, self._words)

    def force_calls(self, use: ToolUse) -> GrammarConstraint:
        """Build a constraint for the calls that a request requires. This can take a second, so call it in a thread.

        Raises:
            ApiError: 400 if the parameters of a tool are invalid or cannot be satisfied.
        """
        try:
            grammar = {"name": _CALLS, "lark_grammar": forced_grammar(use)}
            return self.constrain(json.dumps({"grammars": [grammar]}), "tools")
        except ApiError:
            for function in use.functions:  # the error quotes the grammar, so find the tool that it is about
                self._check_parameters(function)
            raise

    def _check_parameters(self, function: Function) -> None:
        try:
            self.new({**function.parameters, "type": "object"})
        except ApiError as error:
            reason = error.message.split(" cannot be used: ", 1)[-1]
            message = f"{function.path}: the parameters of the tool {function.name!r} cannot be used: {reason}"
            raise ApiError(400, message, param=function.path, code="invalid_function_parameters") from None

    def constrain(self, grammar: str, param: str = "response_format") -> GrammarConstraint:
        """Build a constraint from a grammar in llguidance's format.

        Args:
            grammar: The grammar.
            param: Name of the request's field in errors.

        Raises:
            ApiError: 400 if the grammar cannot be satisfied, or exceeds the limits with the first token.
        """
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_limits_of(grammar))
        if matcher.is_error():
            raise _grammar_error(matcher.get_error(), param)
        constraint = GrammarConstraint(matcher, self._words, grammar)
        try:
            _try_first_token(constraint.copy())
        except GrammarTooAmbiguousError as error:
            raise _grammar_error(f"it {error.reason}", param) from None
        return constraint

    @property
    def _words(self) -> int:
        return (self._vocab_size + 31) // 32

    def build(self, source: GrammarSource) -> GrammarConstraint:
        """Build a constraint from the source of a grammar. This can take a second, so call it in a thread.

        Raises:
            ApiError: 400 if the grammar is invalid or cannot be satisfied.
        """
        param, value = source.param, source.value
        try:
            if source.kind == "json":
                schema = json.loads(value) if isinstance(value, str) else value
                if not isinstance(schema, dict):
                    raise ValueError("it should be a JSON object")
                return self.new(schema, param=param)
            if source.kind == "choice":  # as a single terminal, whose alternatives do not count toward the limits
                choices = " | ".join(json.dumps(choice) for choice in json.loads(value))
                grammar = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
            else:
                grammar = grammar_from(source.kind, value)
        except (ValueError, RecursionError) as error:
            raise _grammar_error(str(error), param) from None
        return self.constrain(grammar, param=param)

    @functools.cached_property
    def _load_tokenizer(self) -> LLTokenizer:
        source = self._tokenizer
        wrapped = source.to_json() if isinstance(source, HasTokenizerJson) else TokenizerWrapper(_Vocabulary(source))
        return LLTokenizer(wrapped, n_vocab=max(self._vocab_size, source.vocab_size), eos_token=source.eos_id)

    @property
    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            return self._load_tokenizer


def _limits_of(grammar: str) -> LLParserLimits:
    """Return the limits for a grammar in llguidance's JSON format or in its form of Lark."""
    try:
        (first,) = json.loads(grammar)["grammars"]
    except ValueError:
        return _LIMITS
    return _JSON_LIMITS if first.get("json_schema") is not None or first.get("name") == _CALLS else _LIMITS


def _try_first_token(constraint: GrammarConstraint) -> None:
    """Accept any token that a constraint allows first. Raises `GrammarTooAmbiguousError` if that exceeds the limits."""
    (positions,) = np.nonzero(constraint.mask())
    if positions.size:
        bits = int(constraint.mask()[positions[0]])
        constraint.accept(int(positions[0]) * 32 + (bits & -bits).bit_length() - 1)


def _grammar_error(reason: str, param: str) -> ApiError:
    if match := _REMOTE.search(reason):
        reason = f"it refers to {match.group(1)!r}, but this server does not fetch schemas; include it under $defs"
    if reason.startswith("recursion limit exceeded"):
        reason = "it is nested too deeply"
    is_schema = "json" in param or "schema" in param or param.startswith(("response_format", "tools"))
    kind, code = ("JSON schema", "invalid_json_schema") if is_schema else ("grammar", "invalid_grammar")
    return ApiError(400, f"{param}: the {kind} cannot be used: {reason}", param=param, code=code)
