"""`POST /v1/completions`."""

import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from axlearn_plugins_serving.contracts import TokenLogprobs
from axlearn_plugins_serving.server.http import DONE, EventStream, UsageReport, event, read_json, respond
from axlearn_plugins_serving.server.logprobs import completion_logprobs
from axlearn_plugins_serving.server.prompt_job import Choice, Delta, Job
from axlearn_plugins_serving.server.schemas import CompletionRequest
from axlearn_plugins_serving.server.service import Service


async def completions(request: HttpRequest) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    body = await read_json(CompletionRequest, request)
    service.adapter(body.model)
    prompts = await _tokens(service, body)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    scored = bool(body.echo) and body.logprobs is not None
    job = await service.submit(
        prompts,
        body,
        max_tokens=max_tokens if max_tokens != 0 else 1,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
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

    def __attrs_post_init__(self) -> None:
        self.head = {
            "id": self.service.new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.service.response_name(self.body.model),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        report = UsageReport(self.body.stream_options)
        if self.body.echo:
            for choice in self.job.choices:
                yield self._event(Delta(choice.index, self._prompt(choice)[0]), report)
        async for deltas in self.job.deltas():
            for delta in deltas:
                if delta.text or delta.finish or delta.scored:
                    yield self._event(attrs.evolve(delta, text="", scored=()) if self.empty else delta, report)
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
        prompt, offsets = self._prompt(choice) if self.body.echo else ("", [])
        text = "" if self.empty else "".join(delta.text for delta in deltas)
        logprobs = None
        if self.body.logprobs is not None:
            scored = [] if self.empty else [s for delta in deltas for s in delta.scored]
            entries: list[tuple[int, TokenLogprobs | None]] = [(len(prompt) + s.offset, s.scores) for s in scored]
            tokens = [s.scores.token for s in scored]
            if self.body.echo:
                scores = (None, *choice.prompt_logprobs)
                entries = [*zip(offsets, scores, strict=True), *entries]
                tokens = [*choice.request.prompt, *tokens]
            logprobs = completion_logprobs(self.service.grammars, entries, tokens, self.body.logprobs)
        finish = "length" if self.empty else choice.finish
        return {"index": choice.index, "text": prompt + text, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, delta: Delta, report: UsageReport) -> bytes:
        logprobs = None
        if self.body.logprobs is not None and delta.scored:
            entries = [(s.offset, s.scores) for s in delta.scored]
            tokens = [s.scores.token for s in delta.scored]
            logprobs = completion_logprobs(self.service.grammars, entries, tokens, self.body.logprobs)
        finish = "length" if self.empty and delta.finish else delta.finish
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish}
        return event({**self.head, "choices": [choice], **report.fields(self.job)})

    def _usage(self) -> dict[str, Any]:
        usage = self.job.usage
        return (attrs.evolve(usage, completion=0) if self.empty else usage).as_json()

    def _prompt(self, choice: Choice) -> tuple[str, list[int]]:
        """Return the prompt's text and each token's offset."""
        prompt: Any = self.body.prompt
        if not isinstance(prompt, str):
            prompt = prompt[choice.index // (self.body.n or 1)]
        return self.service.text.prompt_offsets(choice.request.prompt, prompt if isinstance(prompt, str) else None)
