"""The results that an engine in this process returns."""

import attrs

from axlearn_plugins_serving.contracts import FinishReason, TokenLogprobs


@attrs.frozen(kw_only=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        tokens: New tokens, without the token that ended the output.
        text: Text of `tokens`; None if the model has no tokenizer.
        logprobs: Log-probabilities of `tokens`; None if not requested.
        finish: `stop` or `length`.
    """

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: FinishReason


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
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first sample."""
        return self.samples[0].tokens

    @property
    def text(self) -> str | None:
        """The text of the first sample."""
        return self.samples[0].text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of the first sample."""
        return self.samples[0].logprobs
