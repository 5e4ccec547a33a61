"""Conversion between the text and the tokens of a model.

Training, evaluation, serving and export share it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.experiment import build_tokenizer, get_chat_template_config, get_text_facts
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import EncodesSpecialTokens
from axlearn_core.errors import Problem, nearest
from axlearn_plugins_transformer.text.chat_template import ChatTemplate, RenderedChat
from axlearn_plugins_transformer.text.decoding import Decoders, OutputOptions, OutputText
from axlearn_plugins_transformer.text.protocols import bos_id_of, encode_prompt, first_token

SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Name of a sampling setting -> (minimum, maximum)."""
GREEDY_SAMPLING = ("temperature", "repetition_penalty")
"""The settings that change outputs even if the most likely token is always chosen."""


class TextProcessor(Configurable):
    """Encodes documents, prompts and conversations for a model, and decodes its output.

    Attributes:
        tokenizer: Tokenizer of the model.
        template: Chat template that renders requests with the current time.
        has_template: Whether the model has a chat template or was trained with one. If not, `template` is the plain one.
        end_tokens: Ids that end an output: the end-of-document token and any other end tokens, such as an end-of-turn token.
        sampling: The model's sampling defaults, by the names in `SAMPLING`.
        context_length: Context length of the model in tokens, or None if unknown.
        pooling: Pooling of hidden states to embeddings, or None; see `Config`.
    """

    @node
    class Config(Configurable.Config["TextProcessor"]):
        """Text settings of a model. Imports fill them in, and exports write them.

        Attributes:
            end_tokens: Ids that end an output, in addition to the tokenizer's end-of-document token.
            sampling: Sampling defaults, by the names in `SAMPLING`.
            context_length: Context length of the model in tokens, or None if unknown.
            pooling: Pooling of hidden states that the model was trained for: their mean, the last or the first one. None if it was
                not trained for embeddings.
            template: Chat template. None uses the template of the input, or the one next to the tokenizer's file.
        """

        end_tokens: tuple[int, ...] = ()
        sampling: Mapping[str, float] = {}  # nodes are frozen
        context_length: int | None = setting(default=None, ge=1)
        pooling: Literal["mean", "last", "cls"] | None = None
        template: Node[ChatTemplate] | None = None

        def validate(self) -> Iterable[Problem]:
            """Check token ids and sampling defaults."""
            for i, token in enumerate(self.end_tokens):
                if token < 0:
                    yield Problem(
                        path=f"end_tokens.{i}", message="is not a token id", got=str(token), expected="at least 0"
                    )
            for name, value in self.sampling.items():
                if name not in SAMPLING:
                    expected = f"one of {', '.join(SAMPLING)}"
                    yield Problem(
                        path=f"sampling.{name}",
                        message="unknown sampling default",
                        expected=expected,
                        nearest=nearest(name, SAMPLING),
                    )
                elif not SAMPLING[name][0] <= value <= SAMPLING[name][1]:
                    expected = "{:g} to {:g}".format(*SAMPLING[name])
                    yield Problem(path=f"sampling.{name}", message="is out of range", got=str(value), expected=expected)

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer):
        self.config, self.tokenizer = cfg, tokenizer
        template = (cfg.template or ChatTemplate.Config()).build(tokenizer=tokenizer)
        self.data_template = template
        self.template = template.use_current_time()
        self.has_template = cfg.template is not None or not template.is_plain
        self.end_tokens = frozenset({tokenizer.eos_id, *cfg.end_tokens})
        self.sampling = {name: int(value) if name == "top_k" else value for name, value in cfg.sampling.items()}
        self.context_length, self.pooling = cfg.context_length, cfg.pooling
        self._decoders = Decoders(tokenizer)

    @property
    def document_prefix(self) -> tuple[int, ...]:
        """The first token of a document.

        It is BOS, or the end-of-document token if the model has no BOS.
        """
        return (first_token(self.tokenizer),)

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """The tokens that precede a prompt: BOS, or nothing if the model has no BOS."""
        return tuple(encode_prompt(self.tokenizer, ""))

    def encode_document(self, text: str) -> list[int]:
        """Encode a training document. Special tokens that it spells out stay text."""
        return self.tokenizer.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text to continue.

        Return at least one token. See `axlearn_core.contracts.text.EncodesPrompts`.
        """
        return encode_prompt(self.tokenizer, text) or [self.tokenizer.eos_id]

    def encode_continuation(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a context and its continuation as one text. Return the tokens of each.

        Trailing spaces of the context belong to the continuation, because most tokenizers join spaces with the next word
        (the convention of lm-evaluation-harness). The context is empty only if the model has no BOS token.
        """
        ids, context_ids = self._encode_prefix(context + continuation), self._encode_prefix(context.rstrip())
        return ids[: len(context_ids)], ids[len(context_ids) :]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, prompt: bool = True
    ) -> list[int]:
        """Encode a conversation like `apply_chat_template(tokenize=True)` in `transformers`.

        Args:
            messages: See `axlearn_plugins_transformer.text.messages`.
            tools: Function descriptions, for templates that use them.
            prompt: End with the beginning of an answer.

        Raises:
            InputError: The template rejects the conversation.
        """
        return self.encode_rendered(self.template.render(messages, prompt=prompt, tools=tools, location="messages"))

    def encode_rendered(self, rendered: RenderedChat) -> list[int]:
        """Encode a rendered conversation with its special tokens, without adding a second BOS."""
        return self.template.encode(rendered)[0]

    def encode_marker(self, text: str) -> list[int]:
        """Encode a part of a conversation, such as `<think>`. Special tokens that it spells out are parsed."""
        if isinstance(self.tokenizer, EncodesSpecialTokens):
            return self.tokenizer.encode_special(text)[0]
        return self.tokenizer.encode(text)

    def output(self, prompt: Sequence[int], options: OutputOptions = OutputOptions()) -> OutputText:
        """Return a decoder for the tokens after `prompt` that stops at the first stop string."""
        return self._decoders.output(prompt, options)

    def output_text(self, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """Decode a complete output that follows `prompt`."""
        output = self.output(prompt, OutputOptions(stops=tuple(stops)))
        return "".join([*map(output.push, tokens), output.end()])

    def spell(self, tokens: Sequence[int]) -> str:
        """Decode tokens, including special tokens."""
        return self._decoders.spell(tokens)

    def prompt_offsets(
        self, ids: Sequence[int], text: str | None = None, *, spell_special: bool = False
    ) -> tuple[str, list[int]]:
        """Return a prompt's text, and the offset of each token in it.

        Args:
            ids: Tokens of the prompt.
            text: The text that was encoded. It is returned if the tokens match it. None decodes the tokens.
            spell_special: Whether the decoded text includes the spelling of special tokens.
        """
        if text is not None and (offsets := self._offsets_in(ids, text)) is not None:
            return text, offsets
        output, starts, pieces = self.output((), OutputOptions(spell_special=spell_special)), [], []
        for token in ids:
            starts.append(output.decoded)
            pieces.append(output.push(token))
        return "".join([*pieces, output.end()]), starts

    def _encode_prefix(self, text: str) -> list[int]:
        """Encode a text that will be continued.

        Include a BOS token, but no tokens that the tokenizer appends.
        """
        ids = self.tokenizer.encode_special(text)[0] if isinstance(self.tokenizer, EncodesSpecialTokens) else None
        if ids is None:
            return encode_prompt(self.tokenizer, text)
        bos = bos_id_of(self.tokenizer)
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _offsets_in(self, ids: Sequence[int], text: str) -> list[int] | None:
        if not isinstance(self.tokenizer, EncodesSpecialTokens):
            return None
        text_ids, offsets = self.tokenizer.encode_special(text)
        count = len(text_ids)
        num_before = next((i for i in range(len(ids) - count + 1) if list(ids[i : i + count]) == text_ids), None)
        if num_before is None:
            return None
        num_after = len(ids) - num_before - count
        return [0] * num_before + [start for start, _ in offsets] + [len(text)] * num_after


def text_processor(experiment: Any, tokenizer: Tokenizer | None = None) -> TextProcessor | None:
    """Return the text processor of an experiment, or None if its input has no tokenizer.

    Args:
        experiment: Root config of a trainer.
        tokenizer: Tokenizer of its input, if it is already built.
    """
    tokenizer = build_tokenizer(experiment) if tokenizer is None else tokenizer
    if tokenizer is None:
        return None
    cfg = get_text_facts(experiment)
    cfg = cfg if isinstance(cfg, TextProcessor.Config) else TextProcessor.Config()
    trained = get_chat_template_config(experiment)
    if cfg.template is None and isinstance(trained, ChatTemplate.Config):
        cfg = attrs.evolve(cfg, template=trained)
    return cfg.build(tokenizer=tokenizer)
