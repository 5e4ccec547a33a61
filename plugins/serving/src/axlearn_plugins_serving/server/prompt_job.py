"""The engine requests behind an HTTP request: text, log-probabilities and usage."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import attrs

from axlearn_plugins_serving.contracts import Output, Request, TokenLogprobs
from axlearn_plugins_serving.parsers.answer_formats import CallStart, Parser, Piece, Reasoning, Text
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.engine_thread import (
    EngineFailedError,
    EngineStoppingError,
    EngineThread,
    SlowReaderError,
)
from axlearn_plugins_serving.server.job_timing import Timing
from axlearn_plugins_serving.server.server_metrics import Metrics
from axlearn_plugins_transformer.text.decoding import OutputText

Finish = Literal["stop", "length", "tool_calls"]


@attrs.frozen
class ScoredToken:
    """A token's log-probabilities and the offset of its text.

    Attributes:
        offset: Number of output characters before the token.
    """

    offset: int
    scores: TokenLogprobs


@attrs.frozen
class Delta:
    """New output of a choice.

    Attributes:
        index: Index of the choice.
        text: New text that can no longer change.
        pieces: The text, split into reasoning, text and tool calls.
        scored: Log-probabilities of the tokens in `text`, if requested.
        finish: Reason why the choice ended; None while it is running.
        tokens: New tokens, including the token that ended the output.
    """

    index: int
    text: str
    pieces: tuple[Piece, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish: Finish | None = None
    tokens: tuple[int, ...] = ()


def output_error(output: Output) -> ApiError:
    """Return the error for an output that the engine could not compute."""
    if output.request_wrong and output.error is not None:
        return ApiError(400, output.error, code="invalid_request")
    return ApiError(500, output.error or "the engine ended the request", code="engine_error")


class Choice:
    """One continuation of a prompt.

    Attributes:
        index: Index of the choice.
        request: The engine's request.
        tokens: Number of generated tokens.
        reasoning_tokens: Number of generated tokens that belong to the reasoning.
        prompt_logprobs: Log-probabilities of the prompt tokens after the first, if requested.
        finish: Reason why the choice ended.
    """

    def __init__(self, index: int, request: Request, output: OutputText, parser: Parser | None = None):
        self.index, self.request = index, request
        self.tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.finish: Finish | None = None
        self._output, self._parser = output, parser
        self._calls = self._reasons = self._answers = False
        self._released = 0  # characters
        self._scored: list[ScoredToken] = []

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the choice, or None."""
        return self._output.matched_stop

    def push(self, output: Output) -> Delta:
        """Add an output from the engine and return the new text.

        Raises:
            ApiError: If the engine could not compute the output.
        """
        if output.finish in ("error", "abort"):
            raise output_error(output)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.prompt_logprobs += output.prompt_logprobs or ()
        pieces, num_tokens = [], self.tokens
        for i, token in enumerate(output.tokens):
            self.tokens += 1
            if output.logprobs is not None:
                self._scored.append(ScoredToken(self._output.decoded, output.logprobs[i]))
            pieces.append(self._output.push(token))
            if self._output.stopped:
                break
        tokens = output.tokens[: self.tokens - num_tokens]
        if not self._output.stopped and output.finish is not None:
            if output.stop_token is not None:
                tokens += (output.stop_token,)
                pieces.append(self._output.push_stop_token(output.stop_token))
            pieces.append(self._output.end())
        if self._output.stopped:
            self.finish = "stop"
        elif output.finish is not None:
            self.finish = "stop" if output.finish == "stop" else "length"
        text = "".join(pieces)
        self._released += len(text)
        pieces = self._parse(text)
        self._count_reasoning(pieces)
        if self._calls and self.finish == "stop":
            self.finish = "tool_calls"
        return Delta(self.index, text, pieces, self._release(), self.finish, tokens)

    def _count_reasoning(self, pieces: Sequence[Piece]) -> None:
        """Count the tokens before the first piece of the answer. Parsers return the last pieces of the reasoning late."""
        self._reasons |= any(isinstance(piece, Reasoning) for piece in pieces)
        if self._reasons and not self._answers:
            self.reasoning_tokens = self.tokens
        self._answers |= any(not isinstance(piece, Reasoning) for piece in pieces)

    def _parse(self, text: str) -> tuple[Piece, ...]:
        if self._parser is None:
            return (Text(text),) if text else ()
        pieces = self._parser.push(text) if text else []
        if self.finish is not None:
            pieces += self._parser.end()
        self._calls |= any(isinstance(piece, CallStart) for piece in pieces)
        return tuple(pieces)

    def _release(self) -> tuple[ScoredToken, ...]:
        if self.finish is not None and not self._output.stopped:
            count = len(self._scored)
        else:
            count = 0
            while count < len(self._scored) and self._scored[count].offset < self._released:
                count += 1
        scored, self._scored = tuple(self._scored[:count]), self._scored[count:]
        return scored


@attrs.frozen
class Usage:
    """Token counts for an HTTP request."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the counts in the format of the completions endpoints."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Job:
    """The engine requests behind an HTTP request. Always `close` the job.

    Attributes:
        choices: Choices by index, with `per_prompt` of them for each prompt.
        model: Name of the model that answers.
        timing: Times of the job.
    """

    def __init__(
        self, choices: Sequence[Choice], per_prompt: int, thread: EngineThread, metrics: Metrics, model: str = ""
    ):
        self.choices, self._per_prompt, self.model = tuple(choices), per_prompt, model
        self._thread, self._metrics = thread, metrics
        self._ids = {choice.request.id: choice for choice in choices}
        self.timing = Timing()
        self._outputs = None
        self._failed = self._closed = False

    async def start(self, *, stream: bool) -> "Job":
        """Add the requests to the engine. Raises the same errors as `EngineThread.add`."""
        self._outputs = await self._thread.add([choice.request for choice in self.choices], bounded=stream)
        return self

    @property
    def usage(self) -> Usage:
        """The usage so far. A prompt with several choices counts once."""
        firsts = self.choices[:: self._per_prompt]
        return Usage(
            sum(len(choice.request.prompt) for choice in firsts),
            sum(choice.tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in firsts),
            sum(choice.reasoning_tokens for choice in self.choices),
        )

    @property
    def finish_reasons(self) -> list[str]:
        """The reason why each choice ended: its `finish`, `error`, or `abort` if the client left; `running` before it ends."""
        unfinished = "error" if self._failed else "abort" if self._closed else "running"
        return [choice.finish or unfinished for choice in self.choices]

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield new outputs until all choices have ended.

        Raises:
            ApiError: If the engine fails.
        """
        running = len(self.choices)
        while running:
            outputs = await self._next_outputs()
            self._record(outputs)
            batch = []
            for output in outputs:
                choice = self._ids[output.id]
                if choice.finish is not None:
                    continue
                try:
                    batch.append(choice.push(output))
                except ApiError:
                    self._failed = True
                    raise
                if choice.finish is not None:
                    running -= 1
                    if output.finish is None:  # the engine does not know about stop strings
                        self._thread.abort([output.id])
            yield batch
        self._observe()

    async def _next_outputs(self) -> Sequence[Output]:
        """Wait for outputs. Raises `ApiError` if the engine fails or the client reads too slowly."""
        assert self._outputs is not None
        try:
            return await self._outputs.get()
        except EngineFailedError as error:
            self._failed = True
            status = 503 if isinstance(error, EngineStoppingError) else 500
            raise ApiError(status, str(error), code="engine_error") from None
        except SlowReaderError as error:
            raise ApiError(408, f"the client reads too slowly: {error}", code="slow_reader") from None

    def _record(self, outputs: Sequence[Output]) -> None:
        """Record the times of outputs."""
        timing, now = self.timing, time.monotonic()
        if timing.started is None:
            timing.started = min((o.started for o in outputs if o.started is not None), default=None)
        if not any(output.tokens for output in outputs):
            return
        if timing.last is None:
            timing.first = now
            self._metrics.first_token_seconds.observe(now - timing.began)
        else:
            self._metrics.inter_token_seconds.observe(now - timing.last)
        timing.last = now

    def close(self) -> None:
        """Abort the requests that are still running, and count how the choices ended."""
        if self._outputs is not None and not self._closed:
            self._closed = True
            self._thread.abort(self._outputs.ids)
            for reason in self.finish_reasons:
                self._metrics.finished.labels("stop" if reason == "tool_calls" else reason).inc()

    def _observe(self) -> None:
        timing, usage, metrics = self.timing, self.usage, self._metrics
        timing.last = time.monotonic()
        for histogram, seconds in (
            (metrics.request_seconds, timing.total_seconds),
            (metrics.queue_seconds, timing.queue_seconds),
            (metrics.prefill_seconds, timing.prefill_seconds),
            (metrics.decode_seconds, timing.decode_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        metrics.prompt_length.observe(usage.prompt)
        metrics.output_length.observe(usage.completion)
        decode = timing.decode_seconds
        if decode is not None and len(self.choices) == 1 and usage.completion > 1:
            metrics.output_token_seconds.observe(decode / (usage.completion - 1))
