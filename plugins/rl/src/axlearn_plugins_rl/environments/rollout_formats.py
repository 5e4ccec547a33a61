"""`RolloutFormats`: how the policy of a rollout calls tools and reasons."""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axlearn_core.config import Configurable, node
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_serving.server.answer_reader import AnswerFormats, choose_formats
from axlearn_plugins_transformer.text.processor import TextProcessor


class RolloutFormats(Configurable):
    """The formats in which a policy calls tools and reasons, and the variables of its chat template."""

    @node
    class Config(Configurable.Config["RolloutFormats"]):
        """Names of formats, as for `axlearn serve`.

        Attributes:
            tool_parser: Format of tool calls. None chooses it by the chat template; `none` leaves calls in the text.
            reasoning_parser: Format of the reasoning, as for `tool_parser`.
            options: Variables of the chat template, such as `enable_thinking`.
        """

        tool_parser: str | None = None
        reasoning_parser: str | None = None
        options: Mapping[str, Any] = {}  # nodes are frozen

    def __init__(self, cfg: Config):
        self.config = cfg
        self._chosen: weakref.WeakKeyDictionary[TextProcessor, AnswerFormats] = weakref.WeakKeyDictionary()

    def choose(self, text: TextProcessor) -> AnswerFormats:
        """Return the formats of a model."""
        if text not in self._chosen:
            self._chosen[text] = choose_formats(text, self.config.tool_parser, self.config.reasoning_parser)
        return self._chosen[text]

    def check_tools(self, text: TextProcessor, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError` if the format of tool calls is unknown."""
        formats = self.choose(text)
        if tools and formats.tools is None and not formats.leaves_calls:
            raise ConfigError(
                Problem(
                    path="loop.source.formats.tool_parser",
                    message="the chat template of the model does not tell in which format it calls tools",
                    got="null",
                    expected="the name of a format, such as hermes, or none to leave calls in the text",
                    fix="set it, or leave out the tools",
                )
            )

    def new_numbers(self) -> Iterator[int]:
        """Return numbers for the call ids of a rollout."""
        return itertools.count()
