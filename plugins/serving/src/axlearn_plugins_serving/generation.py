"""The results that an engine in this process returns."""

from collections.abc import Mapping

import attrs
import numpy as np

from axlearn_plugins_serving.contracts import FinishReason, TokenLogprobs


@attrs.frozen(kw_only=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        tokens: New tokens, without the token that ended the output.
        text: Text of `tokens`; None if the model has no tokenizer.
        logprobs: Log-probabilities of `tokens`; None if not requested.
        finish: `stop` or `length`.
        stop_token: Token that ended the output; None if a stop text or the limit of tokens did.
        stop_logprobs: Log-probabilities of `stop_token`; None if not requested.
        versions: The versions of the weights that drew `drawn_tokens`, as (version, number of tokens), in order.
        records: Records of the prompt and of `drawn_tokens` without the last one, by name, [T, L, ...] for L layers; None if not
            requested, or if a stop text ended the output.
    """

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: FinishReason
    stop_token: int | None = None
    stop_logprobs: TokenLogprobs | None = None
    versions: tuple[tuple[int, int], ...] = ()
    records: Mapping[str, np.ndarray] | None = attrs.field(default=None, eq=False)

    @property
    def drawn_tokens(self) -> tuple[int, ...]:
        """The new tokens, including the one that ended the output."""
        return self.tokens if self.stop_token is None else (*self.tokens, self.stop_token)

    @property
    def drawn_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of `drawn_tokens`; None if not requested."""
        if self.logprobs is None or self.stop_logprobs is None:
            return self.logprobs
        return (*self.logprobs, self.stop_logprobs)


@attrs.frozen(kw_only=True)
class Generation:
    """The continuations of one prompt.

    Attributes:
        prompt: Tokens of the prompt.
        samples: The requested number of samples.
        prompt_logprobs: Log-probabilities of the prompt's tokens after the first; None if not requested.
        cached_tokens: Prompt tokens that were in the cache when the first sample started.
    """

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    cached_tokens: int

    @property
    def sample(self) -> Sample:
        """The first sample."""
        return self.samples[0]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first sample."""
        return self.sample.tokens

    @property
    def text(self) -> str | None:
        """The text of the first sample."""
        return self.sample.text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of the first sample."""
        return self.sample.logprobs
