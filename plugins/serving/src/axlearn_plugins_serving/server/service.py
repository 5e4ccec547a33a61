"""`Service`: the served model. It converts request bodies to engine requests."""

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import AxlearnError, RequestError, nearest
from axlearn_plugins_serving.contracts import QueueFullError, Request, Sampling
from axlearn_plugins_serving.server.answer_reader import AnswerFormats, AnswerReader, choose_formats
from axlearn_plugins_serving.server.api_errors import ApiError, draining_error
from axlearn_plugins_serving.server.background import BackgroundResponses
from axlearn_plugins_serving.server.body_check import BodyCheck
from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.conversation import Conversation
from axlearn_plugins_serving.server.conversation_template import RenderedPrompt, render_conversation, template_options
from axlearn_plugins_serving.server.encoded_arrays import decode_arrays
from axlearn_plugins_serving.server.engine_thread import EngineFailedError, EngineThread
from axlearn_plugins_serving.server.grammar_constraint import GrammarConstraint
from axlearn_plugins_serving.server.prompt_job import Choice, Job
from axlearn_plugins_serving.server.request_record import current_request
from axlearn_plugins_serving.server.response_store import ResponseStore
from axlearn_plugins_serving.server.schemas import JsonObjectFormat, JsonSchemaFormat, SamplingFields
from axlearn_plugins_serving.server.server_metrics import Metrics
from axlearn_plugins_serving.server.staged_constraint import StagedConstraint
from axlearn_plugins_serving.server.text_pool import COUNTED, TextLimit, TextPool
from axlearn_plugins_transformer.extras import ExtrasError
from axlearn_plugins_transformer.text.chat_template import ChatTemplateError
from axlearn_plugins_transformer.text.decoding import OutputOptions
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import tokens_beyond

MAX_CONTINUATIONS = 256
NO_TEMPLATE = (
    "this model has no chat template, so it cannot render a conversation; use /v1/completions, or start the server "
    "with --chat-template FILE, or with --chat-template plain for a plain template"
)


@attrs.define(eq=False)
class Service:
    """A served model, with its engine thread, text processing and names.

    Attributes:
        thread: Runs the engine.
        text: Encodes and decodes the model's text.
        name: Name under which clients request the model.
        adapters: Names of LoRA adapters, which clients request as models.
        aliases: Other names under which clients may request the model. Responses contain `name`.
        tool_parser: Name of the format in which the model calls tools. None chooses it by the chat template; `none` does not
            parse calls.
        reasoning_parser: Name of the format in which the model reasons, as for `tool_parser`.
        state: `ok`, `sleeping` or `draining` (no new requests), or `failed`.
        allows_sleep: Whether clients can make the engine sleep.
        allows_adapters: Whether clients can load adapters from the server's file system.
        is_replica: Whether other servers, with stored responses of their own, answer at the same address.
        start_compilations: Number of programs that XLA compiled during startup; 0 if exported programs were loaded.
        bodies: Parses requests.
        text_pool: Threads that parse and tokenize.
        administration: Held while the engine goes to sleep or wakes up, and while adapters change.
        text_limit: Rejects prompts that are too long before they are tokenized.
        formats: Formats in which the model calls tools and reasons.
        responses: Stores responses.
        background: Computes responses in the background.
    """

    thread: EngineThread
    text: TextProcessor
    name: str
    adapters: tuple[str, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    state: str = "ok"
    start_compilations: int = 0
    aliases: tuple[str, ...] = ()
    allows_sleep: bool = False
    allows_adapters: bool = False
    is_replica: bool = False
    created: int = attrs.field(factory=lambda: int(time.time()))
    grammars: Grammars = attrs.field(init=False)
    metrics: Metrics = attrs.field(init=False)
    bodies: BodyCheck = attrs.field(init=False)
    text_pool: TextPool = attrs.field(factory=TextPool, init=False)
    text_limit: TextLimit = attrs.field(init=False)
    formats: AnswerFormats = attrs.field(init=False)
    responses: ResponseStore = attrs.field(factory=ResponseStore)
    background: BackgroundResponses = attrs.field(factory=BackgroundResponses, init=False)
    administration: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _count: Any = attrs.field(factory=itertools.count, init=False)

    def __attrs_post_init__(self) -> None:
        self.bodies = BodyCheck(self.thread.engine.max_context)
        self.text_limit = TextLimit(self.tokenizer, self.thread.engine.max_context)
        self.grammars = Grammars(self.tokenizer, self.thread.engine.vocab_size)
        self.formats = choose_formats(self.text, self.tool_parser, self.reasoning_parser)
        self.metrics = Metrics(self.name, lambda: self.thread.statistics, start_compilations=self.start_compilations)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.text.tokenizer

    def new_id(self, prefix: str) -> str:
        """Return a unique response id that cannot be guessed."""
        return f"{prefix}{os.urandom(12).hex()}{next(self._count):x}"

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` names, or None for the base model.

        Raises:
            ApiError: 404 if the name is unknown.
        """
        if model is None or model == self.name or model in self.aliases:
            return None
        if model in self.adapters:
            return model
        names = (self.name, *self.aliases, *self.adapters)
        close = nearest(model[:200], names)
        hint = f"did you mean {', '.join(close)}?" if close else f"this server has {', '.join(names)}"
        raise ApiError(404, f"unknown model {model[:200]!r}; {hint}", param="model", code="model_not_found")

    async def encode(
        self,
        texts: Sequence[str],
        *,
        limited: bool = True,
        with_special: bool = True,
        param: str = "prompt",
        new_tokens: int = 1,
    ) -> list[list[int]]:
        """Encode texts as prompts, with the tokenizer's prefix.

        Args:
            texts: Prompts.
            limited: Whether to reject texts that cannot fit into the context. If False, only texts longer than `COUNTED`
                characters are rejected.
            with_special: Whether to add the tokenizer's BOS token.
            param: Name of the texts in error messages.
            new_tokens: Minimum number of output tokens.

        Raises:
            ApiError: 400 if a text is too long.
        """

        def encode() -> list[list[int]]:
            for text in texts:
                self.text_limit.check(text, param, allowed=0 if limited else COUNTED)
            prompts = []
            for text in texts:
                prompts.append(self.text.encode_prompt(text) if with_special else self.text.encode_marker(text))
                if limited:
                    # Fail before tokenizing any other text.
                    self.text_limit.check_tokens(len(prompts[-1]), param, new_tokens)
            return prompts

        return await self.text_pool.run(encode, sum(map(len, texts)))

    async def render(self, conversation: Conversation, size: int, *, limited: bool = True) -> RenderedPrompt:
        """Render a conversation.

        Args:
            conversation: The conversation.
            size: Size of the request in bytes. Long requests are rendered in a thread.
            limited: See `encode`.

        Raises:
            ApiError: 400 if there is no template, the template ignores a part of the conversation or rejects it, or its text is
                too long.
        """
        param = conversation.param
        if not self.text.has_template:
            raise ApiError(400, NO_TEMPLATE, param=param, code="no_chat_template")
        options = template_options(self.text.template.variables, conversation)

        def encode() -> RenderedPrompt:
            rendered = render_conversation(self.text.template, conversation, options)
            self.text_limit.check(rendered.text, param, allowed=0 if limited else COUNTED)
            return RenderedPrompt(rendered.text, self.text.encode_rendered(rendered))

        try:
            return await self.text_pool.run(encode, size)
        except ChatTemplateError as error:  # without the path of the template
            message = f"{param}: the model's chat template cannot render it: {error.reason}"
            raise ApiError(400, message, param=param, code="chat_template") from None
        except AxlearnError as error:
            raise ApiError(400, str(error), param=param, code="chat_template") from None

    def check_accepting(self) -> None:
        """Raise `ApiError` (503) if the server accepts no requests."""
        if self.state == "draining":
            raise draining_error()
        if self.state == "sleeping":
            raise ApiError(
                503, "the server sleeps; wake it up with POST /wake_up", code="sleeping", headers={"retry-after": "5"}
            )

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        fields: SamplingFields,
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        reader: AnswerReader | None = None,
        prompt_logprobs: int | None = None,
        param: str = "prompt",
    ) -> Job:
        """Submit prompts to the engine, each `fields.n` times.

        Args:
            prompts: Token ids of each prompt.
            fields: Sampling fields of the request.
            max_tokens: Maximum number of output tokens; None generates until the context is full.
            logprobs: See `Sampling.logprobs`.
            prompt_logprobs: See `Sampling.prompt_logprobs`.
            reader: Splits the answers to a conversation. None returns the outputs as text.
            param: Name of the prompt in error messages.

        Raises:
            ApiError: 400 if the request is invalid, 429 if the queue is full, 503 if the server is stopping.
        """
        self.check_accepting()
        adapter = self.adapter(fields.model)
        if len(prompts) * (fields.n or 1) > MAX_CONTINUATIONS:
            raise ApiError(400, f"{param}: more than {MAX_CONTINUATIONS} continuations in one request", param=param)
        if fields.extras and len(prompts) > 1:
            raise ApiError(400, "extras: the request has several prompts; send one at a time", param="extras")
        extras = await asyncio.to_thread(decode_arrays, fields.extras or {}, "extras") if fields.extras else {}
        prompts = [list(prompt) or [self.tokenizer.eos_id] for prompt in prompts]
        self._check(prompts, fields, max_tokens, param)
        choices: list[Choice] = []
        reader = reader or AnswerReader(formats=AnswerFormats())
        constraint = await self._constraint(fields, reader)
        options = _output_options(fields, reader)
        bad_tokens = self._bad_tokens(fields.bad_words or ())
        for prompt in prompts:
            for _ in range(fields.n or 1):
                index = len(choices)
                request = Request(
                    id=self.new_id("request-"),
                    prompt=tuple(prompt),
                    sampling=attrs.evolve(
                        self._read_sampling(fields, max_tokens, logprobs, prompt_logprobs, index), bad_tokens=bad_tokens
                    ),
                    constraint=None if constraint is None else constraint.copy(),
                    priority=fields.priority,
                    client=fields.user or "",
                    adapter=adapter,
                    extras=extras,
                )
                choices.append(Choice(index, request, self.text.output(prompt, options), reader.new_parser()))
        job = Job(choices, fields.n or 1, self.thread, self.metrics, adapter or self.name)
        self.check_accepting()  # again, because building a constraint takes time
        with engine_errors():
            await job.start(stream=bool(fields.stream))
        if (record := current_request.get()) is not None:
            record.job = job
        return job

    def _read_sampling(
        self,
        fields: SamplingFields,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        index: int,
    ) -> Sampling:
        defaults = self.text.sampling
        top_k = defaults.get("top_k") if fields.top_k is None else fields.top_k
        return Sampling(
            max_tokens=max_tokens,
            temperature=float(defaults.get("temperature", 1.0) if fields.temperature is None else fields.temperature),
            top_k=int(top_k) if top_k and top_k > 0 else None,
            top_p=float(defaults.get("top_p", 1.0) if fields.top_p is None else fields.top_p),
            min_p=float(defaults.get("min_p", 0.0) if fields.min_p is None else fields.min_p),
            seed=None if fields.seed is None else (fields.seed + index) % 2**63,
            presence_penalty=float(fields.presence_penalty or 0.0),
            frequency_penalty=float(fields.frequency_penalty or 0.0),
            repetition_penalty=float(
                defaults.get("repetition_penalty", 1.0)
                if fields.repetition_penalty is None
                else fields.repetition_penalty
            ),
            min_tokens=fields.min_tokens or 0,
            logit_bias={int(token): float(bias) for token, bias in (fields.logit_bias or {}).items()},
            stop_tokens=frozenset(fields.stop_token_ids or ()),
            ignore_end=fields.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=fields.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        )

    async def _constraint(
        self, fields: SamplingFields, reader: AnswerReader
    ) -> GrammarConstraint | StagedConstraint | None:
        format, grammar = fields.response_format, None
        if reader.use.mode == "required":
            if (source := fields.grammar_source) is not None:
                name = source.param.partition(".")[0]
                message = f"{name}: tool_choice requires a call, so there is no text to constrain; remove {name}"
                raise ApiError(400, message, param=name)
            grammar = await asyncio.to_thread(self.grammars.force_calls, reader.use)
        elif (source := fields.grammar_source) is not None:
            grammar = await asyncio.to_thread(self.grammars.build, source)
        elif isinstance(format, (JsonObjectFormat, JsonSchemaFormat)):
            schema = format.json_schema.schema_ if isinstance(format, JsonSchemaFormat) else format.json_schema
            grammar = await asyncio.to_thread(self.grammars.new, schema, param=format.schema_path)
        stages = reader.stages(self.text.encode_marker, self.text.end_tokens, has_grammar=grammar is not None)
        return grammar if stages is None else self.grammars.stage(stages, grammar)

    def _bad_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of words, at the beginning of a text and after a space."""
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        return tuple(tokens for tokens in dict.fromkeys(tuple(self.tokenizer.encode(text)) for text in texts) if tokens)

    def check_prompts(self, prompts: Sequence[Sequence[int]], param: str, new_tokens: int) -> None:
        """Raise `ApiError` (400) if a prompt and `new_tokens` exceed the context, or a token is unknown."""
        vocab_size = self.thread.engine.vocab_size
        for prompt in prompts:
            self.text_limit.check_tokens(len(prompt), param, new_tokens)
            if (greatest := max(prompt)) >= vocab_size:
                spelling = tokens_beyond(self.tokenizer, vocab_size).get(greatest)
                token = greatest if spelling is None else f"{greatest} ({spelling!r})"
                raise ApiError(400, f"{param}: token {token} is not below {vocab_size}", param=param)

    def _check(
        self, prompts: Sequence[Sequence[int]], fields: SamplingFields, max_tokens: int | None, param: str
    ) -> None:
        self.check_prompts(prompts, param, max(1, max_tokens or 1))
        vocab_size = self.thread.engine.vocab_size
        if max_tokens is not None and (fields.min_tokens or 0) > max_tokens:
            message = f"min_tokens: {fields.min_tokens} is more than max_tokens, {max_tokens}"
            raise ApiError(400, message, param="min_tokens")
        for name, tokens in (
            ("logit_bias", map(int, fields.logit_bias or ())),
            ("stop_token_ids", fields.stop_token_ids or ()),
        ):
            for token in tokens:
                if token >= vocab_size:
                    raise ApiError(400, f"{name}: token {token} is not below {vocab_size}", param=name)


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Convert the errors of adding requests to the engine to `ApiError`."""
    try:
        yield
    except QueueFullError as error:
        after = str(max(1, math.ceil(error.retry_after)))
        raise ApiError(429, str(error), code="queue_full", headers={"retry-after": after}) from None
    except RequestError as error:
        raise ApiError(400, str(error), param="extras" if isinstance(error, ExtrasError) else None) from None
    except EngineFailedError as error:
        raise ApiError(503, str(error), code="engine_error") from None


def _output_options(fields: SamplingFields, reader: AnswerReader) -> OutputOptions:
    return OutputOptions(
        stops=fields.stops,
        min_tokens=fields.min_tokens or 0,
        include_stop=fields.include_stop_str_in_output,
        spell_special=not fields.skip_special_tokens,
        spelled=frozenset(reader.special_tokens),
    )
