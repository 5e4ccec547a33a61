"""The engine requests behind an HTTP request: text, log-probabilities and usage."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import attrs

from axlearn_plugins_serving.contracts import Output, Request, TokenLogprobs
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.engine_thread import (
    EngineFailedError,
    EngineStoppingError,
    EngineThread,
    SlowReaderError,
)
from axlearn_plugins_serving.server.server_metrics import Metrics
from axlearn_plugins_transformer.text.decoding import OutputText


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
        scored: Log-probabilities of the tokens in `text`, if requested.
        finish: Reason why the choice ended; None while it is running.
        tokens: New tokens, including the token that ended the output.
    """

    index: int
    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish: Literal["stop", "length"] | None = None
    tokens: tuple[int, ...] = ()


class Choice:
    """One continuation of a prompt.

    Attributes:
        index: Index of the choice.
        request: The engine's request.
        tokens: Number of generated tokens.
        prompt_logprobs: Log-probabilities of the prompt tokens after the first, if requested.
        finish: Reason why the choice ended.
    """

    def __init__(self, index: int, request: Request, output: OutputText):
        self.index, self.request = index, request
        self.tokens = self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.finish: Literal["stop", "length"] | None = None
        self._output = output
        self._released = 0  # characters
        self._scored: list[ScoredToken] = []

    def push(self, output: Output) -> Delta:
        """Add an output from the engine and return the new text.

        Raises:
            ApiError: If the engine could not compute the output.
        """
        if output.finish in ("error", "abort"):
            raise ApiError(500, output.error or "the engine ended the request", code="engine_error")
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
        return Delta(self.index, text, self._release(), self.finish, tokens)

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

    def as_json(self) -> dict[str, object]:
        """Return the counts in the format of the completions endpoints."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Job:
    """The engine requests behind an HTTP request. Always `close` the job.

    Attributes:
        choices: Choices by index, with `per_prompt` of them for each prompt.
    """

    def __init__(self, choices: Sequence[Choice], per_prompt: int, thread: EngineThread, metrics: Metrics):
        self.choices, self._per_prompt = tuple(choices), per_prompt
        self._thread, self._metrics = thread, metrics
        self._ids = {choice.request.id: choice for choice in choices}
        self._began = time.monotonic()
        self._first: float | None = None
        self._outputs = None

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
        )

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield new outputs until all choices have ended.

        Raises:
            ApiError: If the engine fails.
        """
        assert self._outputs is not None
        running = len(self.choices)
        while running:
            try:
                outputs = await self._outputs.get()
            except EngineFailedError as error:
                status = 503 if isinstance(error, EngineStoppingError) else 500
                raise ApiError(status, str(error), code="engine_error") from None
            except SlowReaderError as error:
                raise ApiError(408, f"the client reads too slowly: {error}", code="slow_reader") from None
            if self._first is None and any(output.tokens for output in outputs):
                self._first = time.monotonic()
                self._metrics.first_token_seconds.observe(self._first - self._began)
            batch = []
            for output in outputs:
                choice = self._ids[output.id]
                if choice.finish is not None:
                    continue
                batch.append(choice.push(output))
                if choice.finish is not None:
                    running -= 1
                    if output.finish is None:  # the engine does not know about stop strings
                        self._thread.abort([output.id])
            yield batch
        self._observe()

    def close(self) -> None:
        """Abort the requests that are still running."""
        if self._outputs is not None:
            self._thread.abort(self._outputs.ids)

    def _observe(self) -> None:
        seconds = time.monotonic() - self._began
        usage = self.usage
        self._metrics.request_seconds.observe(seconds)
        self._metrics.prompt_length.observe(usage.prompt)
        self._metrics.output_length.observe(usage.completion)
        if self._first is not None and len(self.choices) == 1 and usage.completion > 1:
            self._metrics.output_token_seconds.observe((seconds - self._first + self._began) / (usage.completion - 1))
