"""Log-probabilities in the two shapes of the OpenAI API."""

from collections.abc import Sequence
from typing import Any

from axlearn_plugins_serving.contracts import TokenLogprobs
from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.prompt_job import ScoredToken

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def spell(grammars: Grammars, token: int) -> str:
    """The text of one token; where it is not UTF-8, `bytes:` and its bytes."""
    raw = grammars.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(grammars: Grammars, scored: Sequence[ScoredToken], top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spell(grammars, token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(grammars.token_bytes(token)),
        }

    content = [
        {**entry(s.scores.token, s.scores.logprob), "top_logprobs": [entry(*pair) for pair in s.scores.top[:top]]}
        for s in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    grammars: Grammars, entries: Sequence[tuple[int, TokenLogprobs | None]], tokens: Sequence[int], top: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice.

    Args:
        grammars: knows how tokens are spelled.
        entries: (where the token's text begins, its log-probabilities) for each token; None for the first of a prompt.
        tokens: the tokens.
        top: how many of the likeliest are listed.
    """

    def likeliest(scores: TokenLogprobs | None) -> dict[str, float] | None:
        if scores is None:
            return None
        pairs = [*reversed(scores.top[:top]), (scores.token, scores.logprob)]  # two tokens may be spelled alike
        return {spell(grammars, token): max(logprob, LOWEST) for token, logprob in pairs}

    return {
        "tokens": [spell(grammars, token) for token in tokens],
        "token_logprobs": [None if s is None else max(s.logprob, LOWEST) for _, s in entries],
        "top_logprobs": [likeliest(s) for _, s in entries],
        "text_offset": [offset for offset, _ in entries],
    }
