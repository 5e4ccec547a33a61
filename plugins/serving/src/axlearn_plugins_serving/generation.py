"""What an engine in this process gives back."""

import attrs

from axlearn_plugins_serving.contracts import FinishReason, TokenLogprobs


@attrs.frozen(kw_only=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        tokens: the new ones, without the token that ended them.
        text: of `tokens`; None where the model has no tokenizer.
        logprobs: one for each of `tokens`; None where they were not asked for.
        finish: `stop`, or `length`.
    """

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: FinishReason


@attrs.frozen(kw_only=True)
class Generation:
    """What was generated for one prompt.

    Attributes:
        prompt: its tokens.
        samples: as many as were asked for.
        prompt_logprobs: of the prompt's tokens after the first; None where they were not asked for.
        cached_tokens: tokens of the prompt that were in the cache when the first sample began.
    """

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    cached_tokens: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the first sample."""
        return self.samples[0].tokens

    @property
    def text(self) -> str | None:
        """Of the first sample."""
        return self.samples[0].text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of the first sample."""
        return self.samples[0].logprobs
