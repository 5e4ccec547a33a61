"""The load of a benchmark: prompts of random tokens, and arrival times."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import RequestError

Endpoint = Literal["completions", "chat"]
_WORDS = (
    *("time", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child", "eye", "place", "work"),
    *("week", "case", "point", "number", "group", "problem", "fact", "line", "end", "kind", "head", "house", "power"),
)


@attrs.frozen
class Lengths:
    """Uniformly distributed lengths.

    Attributes:
        low: Minimum length.
        high: Maximum length, inclusive.
    """

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> "Lengths":
        """Parse `128` or `64:448`."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            raise RequestError(f"{name} {text}: not a length\n    expected: N, or LOW:HIGH") from None
        if not 1 <= lengths.low <= lengths.high:
            raise RequestError(f"{name} {text}: expected 1 <= LOW <= HIGH")
        return lengths

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Draw `count` lengths."""
        return random.integers(self.low, self.high + 1, count).tolist()


@attrs.frozen(kw_only=True)
class Load:
    """The load to send: the number, lengths and arrival times of requests.

    Attributes:
        endpoint: Endpoint to call.
        count: Number of requests.
        input: Prompt lengths in tokens.
        output: Maximum output lengths in tokens.
        prefix: Length of a prefix that all prompts share, in addition to `input`.
        seed: Seed for lengths, tokens and arrival times.
        ignore_eos: Whether to continue after the end token. Every output then has its maximum length.
        temperature: Sampling temperature.
        rate: Requests per second, with Poisson arrivals; infinity sends all at once.
        concurrency: Maximum number of concurrent requests; None for no limit.
    """

    endpoint: Endpoint = "completions"
    count: int = 100
    input: Lengths = Lengths(128, 128)
    output: Lengths = Lengths(64, 64)
    prefix: int = 0
    seed: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    rate: float = float("inf")
    concurrency: int | None = None

    def bodies(
        self, model: str, *, vocab_size: int, tokenizer: Tokenizer | None = None, warm_up: bool = False
    ) -> list[dict[str, Any]]:
        """Return the request bodies.

        Completion prompts are token ids. Chat messages are words, or random tokens decoded by a tokenizer.

        Args:
            model: Name of the model.
            vocab_size: Upper bound of token ids, exclusive.
            tokenizer: Decodes random tokens into chat messages. If None, the messages consist of words.
            warm_up: Whether to use different tokens and a different prefix. The server then cannot have cached the prompts of
                the measured requests.
        """
        random = np.random.default_rng([self.seed, 1] if warm_up else self.seed)
        inputs, outputs = self.input.draw(random, self.count), self.output.draw(random, self.count)
        prefix = random.integers(0, vocab_size, self.prefix).tolist()
        bodies = []
        for size, max_tokens in zip(inputs, outputs, strict=True):
            tokens = [*prefix, *random.integers(0, vocab_size, size).tolist()]
            body: dict[str, Any] = {
                "model": model,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if self.endpoint == "chat":
                content = _random_text(tokens, tokenizer)
                body |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": max_tokens}
            else:
                body |= {"prompt": tokens, "max_tokens": max_tokens}
            if self.ignore_eos:
                body["ignore_eos"] = True
            bodies.append(body)
        return bodies

    def arrivals(self) -> list[float]:
        """Return the arrival times in seconds.

        They are scaled so that the last request arrives at `count / rate`.
        """
        if not np.isfinite(self.rate):
            return [0.0] * self.count
        gaps = np.random.default_rng(self.seed + 1).exponential(1 / self.rate, self.count)
        times = np.cumsum(gaps)
        return (times * (self.count / self.rate / times[-1])).tolist()


def _random_text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
    return tokenizer.decode([token % tokenizer.vocab_size for token in tokens])


def parse_goodput(texts: Sequence[str]) -> Mapping[str, float]:
    """Parse goals such as `ttft:500` (milliseconds) into seconds by name."""
    goals: dict[str, float] = {}
    for text in (part for entry in texts for part in entry.replace(",", " ").split()):
        name, _, value = text.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 <= milliseconds < float("inf"):
            raise RequestError(f"--goodput {text}: expected ttft:MS, tpot:MS or e2el:MS")
        goals[name] = milliseconds / 1000
    return goals
