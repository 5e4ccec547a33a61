"""`POST /v1/completions`."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from axlearn_plugins_serving.contracts import TokenLogprobs
from axlearn_plugins_serving.server.http import DONE, EventStream, UsageReport, event, read_json, respond
from axlearn_plugins_serving.server.logprobs import completion_logprobs, prompt_logprobs
from axlearn_plugins_serving.server.prompt_job import Choice, Delta, Job, ScoredToken
from axlearn_plugins_serving.server.schemas import CompletionRequest
from axlearn_plugins_serving.server.service import Service


async def completions(request: HttpRequest) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    body = await read_json(CompletionRequest, request)
    service.adapter(body.model)
    prompts = await _tokens(service, body)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    scores_echo = bool(body.echo) and body.logprobs is not None
    job = await service.submit(
        prompts,
        body,
        max_tokens=max_tokens if max_tokens != 0 else 1,
        logprobs=body.logprobs,
        prompt_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0) if scores_echo else body.prompt_logprobs,
    )
    texts = _Texts(service, body, job, empty=max_tokens == 0)
    if body.stream:
        return EventStream(texts.events(), job)
    return await respond(request, texts.answer(), job)


async def _tokens(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompts: Any = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    return await service.encode(prompts) if isinstance(prompts[0], str) else prompts


@attrs.define
class _Texts:
    """The choices of a completion.

    Attributes:
        empty: Whether to return only the prompt and its log-probabilities (`max_tokens` is 0).
    """

    service: Service
    body: CompletionRequest
    job: Job
    empty: bool
    head: dict[str, Any] = attrs.field(init=False)
    _prompts: dict[int, tuple[str, list[int]]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.head = {
            "id": self.service.new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.job.model,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        report = UsageReport(self.body.stream_options)
        started: set[int] = set()
        if self.body.echo and self.body.logprobs is None:
            started |= {choice.index for choice in self.job.choices}
            for choice in self.job.choices:
                yield self._first_event(choice, report)
        async for deltas in self.job.deltas():
            for delta in deltas:
                # The first output contains the log-probabilities of the prompt.
                if delta.index not in started and (self.body.echo or self.body.return_token_ids):
                    yield self._first_event(self.job.choices[delta.index], report)
                started.add(delta.index)
                if delta.text or delta.finish or delta.scored or (delta.tokens and self.body.return_token_ids):
                    yield self._event(
                        attrs.evolve(delta, text="", scored=(), tokens=()) if self.empty else delta, report
                    )
        if report.last:
            yield event({**self.head, "choices": [], "usage": self._usage()})
        yield DONE

    async def answer(self) -> dict[str, Any]:
        """Return the complete response."""
        deltas: list[list[Delta]] = [[] for _ in self.job.choices]
        async for batch in self.job.deltas():
            for delta in batch:
                deltas[delta.index].append(delta)
        choices = [self._choice(choice, deltas[choice.index]) for choice in self.job.choices]
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _choice(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        prompt, _ = self._prompt(choice)
        text = "" if self.empty else "".join(delta.text for delta in deltas)
        logprobs = None
        if self.body.logprobs is not None:
            scored = [] if self.empty else [s for delta in deltas for s in delta.scored]
            logprobs = self._logprobs(choice, scored, prompt=bool(self.body.echo))
        finish = "length" if self.empty else choice.finish
        fields: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.service.grammars, choice, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            tokens = [] if self.empty else [token for delta in deltas for token in delta.tokens]
            fields |= {"prompt_token_ids": choice.request.prompt, "token_ids": tokens}
        return {"index": choice.index, "text": prompt + text, "logprobs": logprobs, "finish_reason": finish, **fields}

    def _logprobs(self, choice: Choice, scored: Sequence[ScoredToken], *, prompt: bool) -> dict[str, Any]:
        """Return the log-probabilities of tokens, after those of the prompt's tokens if `prompt` is set."""
        text, offsets = self._prompt(choice)
        entries: list[tuple[int, TokenLogprobs | None]] = [(len(text) + s.offset, s.scores) for s in scored]
        tokens = [s.scores.token for s in scored]
        if prompt:
            entries = [*zip(offsets, (None, *choice.prompt_logprobs), strict=True), *entries]
            tokens = [*choice.request.prompt, *tokens]
        return completion_logprobs(self.service.grammars, entries, tokens, self.body.logprobs or 0)

    def _first_event(self, choice: Choice, report: UsageReport) -> bytes:
        """Return the event with the prompt: its text, log-probabilities and token ids, as requested."""
        scores = self.body.echo and self.body.logprobs is not None
        logprobs = self._logprobs(choice, (), prompt=True) if scores else None
        fields: dict[str, Any] = {"index": choice.index, "text": self._prompt(choice)[0], "logprobs": logprobs}
        if self.body.return_token_ids:
            fields |= {"prompt_token_ids": choice.request.prompt, "token_ids": []}
        return event({**self.head, "choices": [{**fields, "finish_reason": None}], **report.fields(self.job)})

    def _event(self, delta: Delta, report: UsageReport) -> bytes:
        logprobs = None
        if self.body.logprobs is not None and delta.scored:
            logprobs = self._logprobs(self.job.choices[delta.index], delta.scored, prompt=False)
        finish = "length" if self.empty and delta.finish else delta.finish
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish}
        tokens = {"token_ids": delta.tokens} if self.body.return_token_ids else {}
        return event({**self.head, "choices": [{**choice, **tokens}], **report.fields(self.job)})

    def _usage(self) -> dict[str, Any]:
        usage = self.job.usage
        return (attrs.evolve(usage, completion=0) if self.empty else usage).as_json()

    def _prompt(self, choice: Choice) -> tuple[str, list[int]]:
        """Return the prompt's text and each token's offset, or nothing if the output does not echo the prompt."""
        if not self.body.echo:
            return "", []
        index = choice.index // (self.body.n or 1)
        if index not in self._prompts:
            prompt: Any = self.body.prompt if isinstance(self.body.prompt, str) else self.body.prompt[index]
            text, spells = prompt if isinstance(prompt, str) else None, not self.body.skip_special_tokens
            offsets = self.service.text.prompt_offsets(choice.request.prompt, text, spell_special=spells)
            self._prompts[index] = offsets
        return self._prompts[index]
