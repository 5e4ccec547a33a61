"""Fields that constrain an output, besides `response_format`."""

import json as json_text
from typing import Annotated, Any, Literal

import attrs
from pydantic import Field, model_validator

from axlearn_plugins_serving.server.body import Body
from axlearn_plugins_serving.server.early_checks import MAX_ENTRIES, exceeds

MAX_GRAMMAR = 64 * 1024
"""Maximum number of characters in a grammar, a regular expression, a JSON schema, or all choices together."""

JSON_OPTIONS: Any = {"whitespace_pattern": r"(\r?\n)?([ ]{0,32}|\t{0,16})"}
"""Limits the white space between JSON tokens, so that a model cannot generate it forever."""

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]


class StructuredOutputs(Body):
    """The field `structured_outputs` of vLLM. Exactly one of its fields is set.

    Attributes:
        json: A JSON schema, or its text.
        json_object: Whether to generate a JSON object.
        regex: Regular expression that the whole output matches.
        choice: Texts, one of which is the output.
        grammar: Grammar in the format of Lark or GBNF.
    """

    json_: dict[str, Any] | GrammarText | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)
        ]
        | None
    ) = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _check(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1:
            raise ValueError("set exactly one of json, json_object, regex, choice and grammar")
        if exceeds([self.json_, self.choice], MAX_GRAMMAR):
            raise ValueError(f"the JSON schema or the choices have more than {MAX_GRAMMAR} characters")
        return self

    @property
    def source(self) -> "GrammarSource":
        """The grammar that the field requests."""
        param = "structured_outputs"
        if self.regex is not None:
            return GrammarSource("regex", self.regex, f"{param}.regex")
        if self.choice is not None:
            return GrammarSource("choice", json_text.dumps(self.choice), f"{param}.choice")
        if self.grammar is not None:
            return GrammarSource("grammar", self.grammar, f"{param}.grammar")
        schema = {"type": "object"} if self.json_ is None else self.json_
        return GrammarSource("json", schema, f"{param}.json" if self.json_ is not None else f"{param}.json_object")


@attrs.frozen
class GrammarSource:
    """The source of a grammar.

    Attributes:
        kind: Kind of the source.
        value: The text of the source, or a JSON schema.
        param: Path of the field that contains it.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    param: str
