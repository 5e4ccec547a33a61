"""Conversations rendered by a Jinja template, with the positions of answers.

The templates are those of Hugging Face tokenizers (`chat_template` in tokenizer_config.json, or chat_template.jinja). They come
from untrusted sources, so they run in Jinja's sandbox, in a separate process with limits on time and memory, and can only call
the functions that are passed to them.
"""

import copy
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import jinja2

from axlearn_core.config import Configurable, node, setting
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import EncodesSpecialTokens
from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.data_files import open_file
from axlearn_plugins_transformer.text.messages import normalize_messages, normalize_tools
from axlearn_plugins_transformer.text.protocols import SpellsEos, bos_token_of, folder_of
from axlearn_plugins_transformer.text.template_process import TemplateFailed, TemplateProcess
from axlearn_plugins_transformer.text.template_server import (
    BEGIN,
    END,
    FAILURES,
    compile_template,
    parse_template,
    template_variables,
)

PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}:\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""Template for tokenizers without one: the role on a separate line, and the end-of-document token after answers."""

_PLAIN_WITH_CALLS = PLAIN.replace(
    "{{ message.content }}{{ eos_token }}",
    "{{ message.content }}{% for call in message.tool_calls %}{{ '\n' if message.content or not loop.first else '' }}"
    "{{ (call.function or call) | tojson }}{% endfor %}{{ eos_token }}",
)

EOS = "\ufdd2"  # a noncharacter, like `BEGIN` and `END`; replaces an end-of-document token that has no spelling
_TOKENIZER_CONFIG, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Path of the template for conversations with tools, relative to a `chat_template.jinja`."""
_FILES = ("chat_template.jinja", "chat_template.json", _TOKENIZER_CONFIG)
_IMPORTED = "huggingface"  # folder in an imported run that holds the model's files other than the tokenizer


class Span(NamedTuple):
    """A range of characters, from `start` up to but not including `stop`."""

    start: int
    stop: int


@attrs.frozen
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: Text for the tokenizer, with special tokens spelled out.
        answers: Spans of the assistant's messages, each with the tokens that end it.
    """

    text: str
    answers: tuple[Span, ...] = ()


class ChatTemplateError(InputError):
    """A chat template cannot render a conversation.

    Attributes:
        reason: The reason, without the template's file and the name of the conversation.
    """

    def __init__(self, message: str, reason: str = ""):  # with a default, because pickle passes only the message
        super().__init__(message)
        self.reason = reason


class ChatTemplate(Configurable):
    """Renders and tokenizes conversations, and marks the assistant's tokens."""

    @node
    class Config(Configurable.Config["ChatTemplate"]):
        """Source of the template.

        Attributes:
            path: A tokenizer_config.json or a .jinja file. None uses the template next to the tokenizer's file, or the
                plain template if there is none.
            plain: Use the plain template even if the tokenizer has one.
            today: Date (YYYY-MM-DD) for templates that ask for it. Training needs a fixed date, so that the same data always
                produces the same tokens. None uses the current time, for serving.
        """

        path: str | None = setting(
            default=None, asset=True, siblings=(_TOKENIZER_CONFIG, _SPECIAL_TOKENS, TOOL_TEMPLATE)
        )
        plain: bool = setting(default=False, hide_default=True)
        today: str | None = "2024-07-26"

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer):
        self.config, self.tokenizer = cfg, tokenizer
        if cfg.plain:
            path = None
        else:
            path = os.path.expanduser(cfg.path) if cfg.path is not None else _template_file(tokenizer)
        sources, self.special = _read(path) if path else ({}, {})
        if not sources and cfg.path is not None and not cfg.plain:
            raise InputError(f"{path} has no chat template\n    expected: a field 'chat_template', or a .jinja file")
        self.is_plain = not sources
        self.source = PLAIN if self.is_plain else sources.get("default") or next(iter(sources.values()))
        self.tool_source = sources.get("tool_use")
        self.name = "the plain chat template" if self.is_plain else path
        self.special.setdefault("eos_token", tokenizer.eos_token if isinstance(tokenizer, SpellsEos) else EOS)
        if bos := bos_token_of(tokenizer):
            self.special.setdefault("bos_token", bos)

    @property
    def digest(self) -> str:
        """Hash of the template, for the run lock."""
        tools = [] if self.tool_source is None else [self.tool_source]
        facts = [self.source, self.special, self.config.today, *tools]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def use_current_time(self) -> "ChatTemplate":
        """Return a copy of the template that uses the current time, for requests.

        Training uses a fixed date.
        """
        other = copy.copy(self)
        other.config = attrs.evolve(self.config, today=None)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_processes"}  # each worker process starts its own

    @functools.cached_property
    def _processes(self) -> dict[str, TemplateProcess]:
        return {}

    def _render(self, variables: dict[str, Any]) -> str:
        source = self.source if self.tool_source is None or variables["tools"] is None else self.tool_source
        if source == PLAIN:  # the template of this package does not need limits
            calls = any(message.get("tool_calls") for message in variables["messages"])
            return _plain_template(_PLAIN_WITH_CALLS if calls else PLAIN).render(variables)
        process = self._processes.setdefault(source, TemplateProcess(source))
        return process.render(variables, today=self.config.today)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return template_variables(self.source, *([] if self.tool_source is None else [self.tool_source]))

    def check_syntax(self) -> None:
        """Raise `InputError` if the template has a syntax error. Otherwise, the first conversation raises it."""
        for source in filter(None, (self.source, self.tool_source)):
            try:
                parse_template(source)
            except jinja2.TemplateSyntaxError as error:
                raise InputError(f"{self.name}: line {error.lineno}: {error.message}") from None
            except RecursionError:
                raise InputError(f"{self.name}: its blocks or expressions are nested too deeply") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Any = None,
        options: Mapping[str, Any] | None = None,
        location: str = "chat",
    ) -> RenderedChat:
        """Render a conversation.

        Args:
            messages: Messages with `role` and `content`; see `normalize_messages`.
            prompt: End the text with the beginning of an answer, for the assistant to continue.
            tools: Function descriptions, for templates that use them.
            options: Further variables of the template, such as `enable_thinking`.
            location: Name of the conversation in errors.

        Returns:
            The text, and the answers that the template marks (`{% generation %}`).

        Raises:
            ChatTemplateError: The template rejects the conversation, or fails.
        """
        messages = normalize_messages(messages)
        variables = {
            **(options or {}),
            "messages": messages,
            "add_generation_prompt": prompt,
            "tools": normalize_tools(tools),
            **self.special,
        }
        try:
            marked = self._render(variables)
        except TemplateFailed as error:
            if error.line is not None:
                reason = f"line {error.line}: {error}"
                raise ChatTemplateError(f"{self.name}: {reason}", reason) from None
            raise ChatTemplateError(f"{location}: {self.name} cannot render it: {error}", str(error)) from None
        except FAILURES as error:
            raise ChatTemplateError(f"{location}: {self.name} cannot render it: {error}", str(error)) from None
        parts, spans, start = [], [], 0
        for i, piece in enumerate(marked.replace(END, BEGIN).split(BEGIN)):
            parts.append(piece)
            if i % 2:
                spans.append(Span(start, start + len(piece)))
            start += len(piece)
        return RenderedChat("".join(parts), tuple(spans))

    def render_answers(
        self, messages: Sequence[Mapping[str, Any]], *, last: bool = False, tools: Any = None, location: str = "chat"
    ) -> RenderedChat:
        """Render a conversation with the positions of the assistant's messages.

        If the template does not mark answers, an answer is the text that it adds to the rendering of the preceding messages.

        Args:
            messages: Messages with `role` and `content`.
            last: Mark only the last answer.
            tools: Function descriptions; see `render`.
            location: Name of the conversation in errors.

        Raises:
            InputError: The template renders an answer differently when more messages follow, so its position is unknown.
        """
        full = self.render(messages, tools=tools, location=location)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if "endgeneration" in self.source and full.answers:
            return attrs.evolve(full, answers=full.answers[-1:]) if last else full
        spans = []
        for i in turns[-1:] if last else turns:
            text_before = self.render(messages[:i], prompt=True, tools=tools, location=location).text
            text_after = self.render(messages[: i + 1], tools=tools, location=location).text
            if not (text_after.startswith(text_before) and full.text.startswith(text_after)):
                raise InputError(
                    f"{location}: {self.name} renders messages[{i}] differently when more messages follow, so the position "
                    "of the answer is unknown\n"
                    "    fix: set answers to 'last', or put {% generation %} and {% endgeneration %} around answers in "
                    "the template"
                )
            spans.append(Span(len(text_before), len(text_after)))
        return attrs.evolve(full, answers=tuple(spans))

    def encode(self, rendered: RenderedChat) -> tuple[list[int], list[bool]]:
        """Return the token ids, and whether each token is in an answer.

        Spelled-out special tokens are parsed.
        """
        if isinstance(self.tokenizer, EncodesSpecialTokens):  # encode the whole text: pieces may tokenize differently
            ids, offsets = self.tokenizer.encode_special(rendered.text)
            return ids, _mark_answers(offsets, rendered.answers)
        ids, marks, offset = [], [], 0
        for span in (*rendered.answers, Span(len(rendered.text), len(rendered.text))):
            for text, inside in (
                (rendered.text[offset : span.start], False),
                (rendered.text[span.start : span.stop], True),
            ):
                piece = self._pieces(text)
                ids, marks = [*ids, *piece], [*marks, *[inside] * len(piece)]
            offset = span.stop
        return ids, marks

    def _pieces(self, text: str) -> list[int]:
        first, *later = text.split(EOS)
        ids = self.tokenizer.encode(first) if first else []
        for piece in later:
            ids = [*ids, self.tokenizer.eos_id, *(self.tokenizer.encode(piece) if piece else [])]
        return ids


@functools.cache
def _plain_template(source: str) -> Any:
    return compile_template(source)


def _mark_answers(offsets: Sequence[tuple[int, int]], answers: Sequence[Span]) -> list[bool]:
    """Return whether each token begins in an answer.

    Offsets and answers are in text order.
    """
    marks, index = [], 0
    for start, _ in offsets:
        while index < len(answers) and answers[index].stop <= start:
            index += 1
        marks.append(index < len(answers) and answers[index].start <= start)
    return marks


def _template_file(tokenizer: Tokenizer) -> str | None:
    folder = folder_of(tokenizer)
    folders = [] if folder is None else [folder, os.path.join(folder, _IMPORTED)]
    paths = [os.path.join(f, name) for f in folders for name in _FILES]
    return next((p for p in paths if os.path.isfile(p) and _read(p)[0]), None)


def _read(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the templates in a file and the special tokens, both by name.

    The special tokens of a .jinja file are in the tokenizer_config.json next to it.
    """
    text = _read_text(path)
    if not path.endswith(".json"):
        tools = os.path.join(os.path.dirname(path), TOOL_TEMPLATE)
        has_tools = os.path.basename(path) == _FILES[0] and os.path.isfile(tools)
        return {"default": text, **({"tool_use": _read_text(tools)} if has_tools else {})}, _read_special_tokens(path)
    try:
        facts = json.loads(text)
        template = facts.get("chat_template")
        templates = (
            {t["name"]: t["template"] for t in template} if isinstance(template, list) else {"default": template}
        )
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise InputError(f"{path} is not a tokenizer_config.json: {error}") from None
    special = {**_read_special_tokens(path), **_special_tokens(facts)}
    return {name: source for name, source in templates.items() if isinstance(source, str)}, special


def _read_text(path: str) -> str:
    with open_file(path) as handle:
        return handle.read().decode("utf-8", "replace")


def _special_tokens(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens, name -> spelling.

    `facts` is a tokenizer_config.json or special_tokens_map.json.
    """
    extra = facts.get("extra_special_tokens")
    fields = {**facts, **(extra if isinstance(extra, Mapping) else {})}
    tokens = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in fields.items() if k.endswith("_token")}
    return {k: v for k, v in tokens.items() if isinstance(v, str)}


def _read_special_tokens(path: str) -> dict[str, str]:
    """Return the special tokens in the files next to a template.

    tokenizer_config.json takes precedence.
    """
    special: dict[str, str] = {}
    for name in (_SPECIAL_TOKENS, _TOKENIZER_CONFIG):
        file = os.path.join(os.path.dirname(path), name)
        if os.path.isfile(file):
            special |= _special_tokens(_read_facts(file))
    return special


def _read_facts(path: str) -> Mapping[str, Any]:
    try:
        facts = json.loads(_read_text(path))
    except ValueError as error:
        raise InputError(f"{path} is not a JSON file: {error}") from None
    return facts if isinstance(facts, Mapping) else {}
