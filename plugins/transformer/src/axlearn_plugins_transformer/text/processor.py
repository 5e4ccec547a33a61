"""How the text of one model becomes tokens and back: the only place that training, evaluation, serving and export ask."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.config.tree import children
from axlearn_core.contracts.experiment import build_tokenizer, input_of, text_of
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import EncodesSpecialTokens
from axlearn_core.errors import Problem, nearest
from axlearn_plugins_transformer.text.chat_template import ChatTemplate, Rendered
from axlearn_plugins_transformer.text.decoding import Decoders, OutputText
from axlearn_plugins_transformer.text.protocols import bos_id_of, encode_prompt, first_token

SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}
"""Name of a sampling setting -> (least, greatest) value."""


class TextProcessor(Configurable):
    """Encodes documents, prompts and conversations for one model, and decodes what it generates.

    Attributes:
        tokenizer: of the model.
        template: renders conversations at the time of a request; see `has_template`.
        has_template: whether the model brings a chat template, or was trained with one. `template` is the plain one otherwise.
        end_tokens: ids that end an output: the end-of-document token, and others such as the end of a turn.
        sampling: the model's defaults for requests that do not say: temperature, top_k, top_p, min_p.
        context_length: tokens that the model was made for; None if nothing says.
    """

    @node
    class Config(Configurable.Config["TextProcessor"]):
        """Facts about the text of a model. An import fills them, and an export writes them.

        Attributes:
            end_tokens: ids that end an output, in addition to the end-of-document token of the tokenizer.
            sampling: defaults of requests, by name: temperature, top_k, top_p, min_p.
            context_length: tokens that the model was made for; None if nothing says.
            template: renders conversations. None takes the template that the input trains with, or the one beside the
                tokenizer's file.
        """

        end_tokens: tuple[int, ...] = ()
        sampling: Mapping[str, float] = {}  # nodes are frozen
        context_length: int | None = setting(default=None, ge=1)
        template: Node[ChatTemplate] | None = None

        def validate(self) -> Iterable[Problem]:
            """Check that token ids and sampling defaults are possible."""
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
                        message="unknown default",
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
        self.template = template.at_request_time()
        self.has_template = cfg.template is not None or not template.is_plain
        self.end_tokens = frozenset({tokenizer.eos_id, *cfg.end_tokens})
        self.sampling = {name: int(value) if name == "top_k" else value for name, value in cfg.sampling.items()}
        self.context_length = cfg.context_length
        self._decoders = Decoders(tokenizer)

    @property
    def document_prefix(self) -> tuple[int, ...]:
        """The token that a document begins with: BOS, or the end-of-document token if the model has no BOS."""
        return (first_token(self.tokenizer),)

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """What a prompt begins with: the BOS token, or nothing if the model has none."""
        return tuple(encode_prompt(self.tokenizer, ""))

    def encode_document(self, text: str) -> list[int]:
        """Encode a document to learn from. Special tokens that it spells out stay text."""
        return self.tokenizer.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text to continue; at least one token. See `axlearn_core.contracts.text.EncodesPrompts`."""
        return encode_prompt(self.tokenizer, text) or [self.tokenizer.eos_id]

    def encode_continuation(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """(the tokens of a context, those of what follows it), as one text to the tokenizer.

        Spaces at the end of the context belong to the continuation, as most tokenizers join them with the word behind them
        (the convention of lm-evaluation-harness). The first part is empty only if the model has no BOS token.
        """
        whole, before = self._encode_front(context + continuation), self._encode_front(context.rstrip())
        return whole[: len(before)], whole[len(before) :]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, prompt: bool = True
    ) -> list[int]:
        """Encode a conversation as `apply_chat_template(tokenize=True)` of `transformers` does.

        Args:
            messages: see `axlearn_plugins_transformer.text.messages`.
            tools: descriptions of functions, for templates that take them.
            prompt: ends with what begins an answer.

        Raises:
            InputError: the template refuses the conversation.
        """
        return self.encode_rendered(self.template.render(messages, prompt=prompt, tools=tools, location="messages"))

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Encode what a template rendered: with its special tokens, and without a second BOS."""
        return self.template.encode(rendered)[0]

    def output(self, prompt: Sequence[int], stops: Sequence[str] = ()) -> OutputText:
        """Decode an output that follows `prompt` as its tokens come, up to the first of `stops`."""
        return self._decoders.output(prompt, stops)

    def output_text(self, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text of a whole output that follows `prompt`."""
        output = self.output(prompt, stops)
        return "".join([*map(output.push, tokens), output.end()])

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens with the spellings of special tokens."""
        return self._decoders.spell(tokens)

    def prompt_offsets(self, ids: Sequence[int], text: str | None = None) -> tuple[str, list[int]]:
        """(the text of a prompt, where each of its tokens begins in that text).

        Args:
            ids: of the prompt.
            text: what they were encoded from, which is the text then; None decodes the ids.
        """
        if text is not None and (offsets := self._offsets_in(ids, text)) is not None:
            return text, offsets
        output, starts, pieces = self.output(()), [], []
        for token in ids:
            starts.append(output.decoded)
            pieces.append(output.push(token))
        return "".join([*pieces, output.end()]), starts

    def _encode_front(self, text: str) -> list[int]:
        """The ids of a text that is not at its end: with a BOS token, and without what the tokenizer appends."""
        own = self.tokenizer.encode_special(text)[0] if isinstance(self.tokenizer, EncodesSpecialTokens) else None
        if own is None:
            return encode_prompt(self.tokenizer, text)
        bos = bos_id_of(self.tokenizer)
        return own if bos is None or own[:1] == [bos] else [bos, *own]

    def _offsets_in(self, ids: Sequence[int], text: str) -> list[int] | None:
        if not isinstance(self.tokenizer, EncodesSpecialTokens):
            return None
        own, offsets = self.tokenizer.encode_special(text)
        front = next((i for i in range(len(ids) - len(own) + 1) if list(ids[i : i + len(own)]) == own), None)
        if front is None:
            return None
        behind = len(ids) - front - len(own)
        return [0] * front + [start for start, _ in offsets] + [len(text)] * behind


def text_processor(experiment: Any, tokenizer: Tokenizer | None = None) -> TextProcessor | None:
    """The text processor of an experiment; None if its input has no tokenizer.

    Args:
        experiment: the root config of a trainer.
        tokenizer: that of its input, if it is built already.
    """
    tokenizer = build_tokenizer(experiment) if tokenizer is None else tokenizer
    if tokenizer is None:
        return None
    cfg = text_of(experiment)
    cfg = cfg if isinstance(cfg, TextProcessor.Config) else TextProcessor.Config()
    trained = children(input_of(experiment)).get("template")
    if cfg.template is None and isinstance(trained, ChatTemplate.Config):
        cfg = attrs.evolve(cfg, template=trained)
    return cfg.build(tokenizer=tokenizer)
