"""The `chat` feature."""

from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, get_options, node, patch, replace_config, setting
from axlearn_core.contracts.experiment import get_input_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.text.chat_input import ChatInput
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.conversations import ChatFiles
from axlearn_plugins_transformer.text.language_model import LanguageModelInput

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Chat(Feature):
    """Trains on conversations.

    Rows are `{"messages": [{"role": ..., "content": ...}]}`. Only the assistant's answers count toward the loss. The
    feature keeps the tokenizer, the batch size and the other settings of the input. If the input already reads
    conversations, the feature sets the given options. Without `validation` and `validation_fraction`, set `evaluators={}`.

    Attributes:
        data: JSONL files, as paths or globs.
        validation: JSONL files with held-out conversations.
        validation_fraction: Share of `data` to hold out.
        template: A tokenizer_config.json or .jinja file (default: the one next to the tokenizer's file, or a plain one).
        answers: `all` trains on all answers of a conversation, `last` only on the last one.
        too_long: Handling of conversations that are longer than a row: `error`, `truncate` or `drop`.
    """

    stage = "replace"
    replaces = ("input.source",)
    example = "data=chat.jsonl"

    data: str | tuple[str, ...] = REQUIRED
    validation: str | tuple[str, ...] = ()
    validation_fraction: float = setting(default=0.0, ge=0, lt=1)
    template: str | None = None
    answers: Literal["all", "last"] | None = None
    too_long: Literal["error", "truncate", "drop"] | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Replace the text input with an input for conversations."""
        if not isinstance(get_input_config(cfg), LanguageModelInput.Config):
            raise ConfigError(
                Problem(
                    path="input",
                    message="chat finds no text input with a tokenizer",
                    expected="a language-model-input",
                    fix="leave chat out, or set input to a chat-input",
                )
            )
        source = ChatFiles.Config(
            paths=self.data, validation_paths=self.validation, validation_fraction=self.validation_fraction
        )
        options = get_options(self, "answers", "too_long")
        if self.template is not None:
            options["template"] = ChatTemplate.Config(path=self.template)
        if isinstance(cfg.input, ChatInput.Config):  # type: ignore[attr-defined]
            return patch(cfg, {"input": attrs.evolve(cfg.input, source=source, **options)})  # type: ignore[attr-defined]
        new_input = replace_config(cfg.input, LanguageModelInput, ChatInput.Config(source=source, **options))  # type: ignore[attr-defined]
        return patch(cfg, {"input": new_input})
