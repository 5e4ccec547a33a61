"""`PendingSample`: a request of a `LocalEngine`, and its output so far."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_serving.contracts import FinishReason, Output, Request, TokenLogprobs
from axlearn_plugins_serving.generation import Generation, Sample
from axlearn_plugins_transformer.text.decoding import OutputText


class PendingSample:
    """The output of a request, up to the first stop text.

    Attributes:
        request: The request.
        future: Gets the result, if the request was submitted.
        prompt_logprobs: Log-probabilities of the prompt's tokens after the first, if requested.
        cached_tokens: Number of prompt tokens that were in the cache.
        finish: Reason why the request ended; None before.
    """

    def __init__(self, request: Request, output: OutputText | None, future: "Future[Generation] | None" = None):
        self.request, self.future = request, future
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self._output = output
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._stop_token: int | None = None
        self._stop_logprobs: TokenLogprobs | None = None
        self._versions: list[tuple[int, int]] = []
        self._records: Mapping[str, np.ndarray] | None = None
        self._error: Exception | None = None

    @property
    def finished(self) -> bool:
        """True if the request has ended."""
        return self.finish is not None

    def take(self, output: Output) -> None:
        """Add an output of the engine."""
        count = self._push(output.tokens)
        self._tokens += output.tokens[:count]
        if output.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *output.logprobs[:count]]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens, self.finish = output.cached_tokens, output.finish
        self._records = output.records
        if output.error is not None:
            self._error = RequestError(output.error) if output.request_wrong else WorkError(output.error)
        if self._output is not None and self._output.stopped:
            self.finish = "stop"
        else:
            self._stop_token, self._stop_logprobs = output.stop_token, output.stop_logprobs
            count += output.stop_token is not None
            if self._output is not None and self.finished:
                self._pieces.append(self._output.end())
        self._add_version(output.version, count)

    def _push(self, tokens: Sequence[int]) -> int:
        """Decode tokens up to the one that completes a stop text.

        Return the number of decoded tokens.
        """
        if self._output is None:
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            self._pieces.append(self._output.push(token))
            if self._output.stopped:
                return count
        return len(tokens)

    def _add_version(self, version: int, count: int) -> None:
        if self._versions and self._versions[-1][0] == version:
            count += self._versions.pop()[1]
        if count:
            self._versions.append((version, count))

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._error, self.finish = error, "error"

    def abort(self) -> None:
        """End the request without a result."""
        self.finish = "abort"

    def take_text(self) -> str | None:
        """Return the text since the last call, or None if the model has no tokenizer."""
        if self._output is None:
            return None
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)

    def check(self) -> None:
        """Raise the error that ended the request, if there is one."""
        if self._error is not None:
            raise self._error

    def build(self) -> Sample:
        """Return the result of a request that has ended."""
        return Sample(
            tokens=tuple(self._tokens),
            text=self.take_text(),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish=self.finish or "abort",
            stop_token=self._stop_token,
            stop_logprobs=self._stop_logprobs,
            versions=tuple(self._versions),
            records=self._records,
        )

    def resolve(self) -> None:
        """Give the result or the error to the future, unless it was cancelled."""
        if self.future is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            self.check()
            result = build_generation([self])
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def build_generation(samples: Sequence[PendingSample]) -> Generation:
    """Return the result of requests with the same prompt."""
    first = samples[0]
    return Generation(
        prompt=tuple(first.request.prompt),
        samples=tuple(sample.build() for sample in samples),
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
    )
