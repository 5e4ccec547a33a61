"""The feature `chat`."""

from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, node, options_of, patch, replace_config, setting
from axlearn_core.contracts.experiment import input_of
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.text.chat_input import ChatInput
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.conversations import ChatFiles
from axlearn_plugins_transformer.text.language_model import LanguageModelInput

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Chat(Feature):
    """Trains on conversations: rows of `{"messages": [{"role": ..., "content": ...}]}`, where only answers count.

    `data` are JSONL files, as paths or globs. Held-out conversations are in files of their own (`validation`), or a share
    of `data` (`validation_fraction`); with neither, set `evaluators={}`. `template` is a tokenizer_config.json or a .jinja
    file, by default the one beside the tokenizer's file, or a plain one. `answers: last` learns the last answer of each
    conversation only, `too_long` says what becomes of one that is longer than a row: `error`, `truncate` or `drop`.

    The tokenizer, the batch size and the rest of the input stay. An input that reads conversations already gets the
    options that are given.
    """

    stage = "replace"
    example = "data=chat.jsonl"

    data: str | tuple[str, ...] = REQUIRED
    validation: str | tuple[str, ...] = ()
    validation_fraction: float = setting(default=0.0, ge=0, lt=1)
    template: str | None = None
    answers: Literal["all", "last"] | None = None
    too_long: Literal["error", "truncate", "drop"] | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Puts the input for conversations in the place of the one for text."""
        if not isinstance(input_of(cfg), LanguageModelInput.Config):
            raise ConfigError(
                Problem(
                    path="input",
                    message="chat finds no input of text whose tokenizer it could keep",
                    expected="a language-model-input",
                    fix="leave chat out, or set input to a chat-input",
                )
            )
        source = ChatFiles.Config(
            paths=self.data, validation_paths=self.validation, validation_fraction=self.validation_fraction
        )
        options = options_of(self, "answers", "too_long")
        if self.template is not None:
            options["template"] = ChatTemplate.Config(path=self.template)
        if isinstance(cfg.input, ChatInput.Config):  # type: ignore[attr-defined]
            return patch(cfg, {"input": attrs.evolve(cfg.input, source=source, **options)})  # type: ignore[attr-defined]
        new_input = replace_config(cfg.input, LanguageModelInput, ChatInput.Config(source=source, **options))  # type: ignore[attr-defined]
        return patch(cfg, {"input": new_input})
