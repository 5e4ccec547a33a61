"""Log-probabilities in the formats of the completions and chat endpoints."""

from collections.abc import Sequence
from typing import Any

from axlearn_plugins_serving.contracts import TokenLogprobs
from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.prompt_job import Choice, ScoredToken

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not support."""


def spell(grammars: Grammars, token: int) -> str:
    """Return the text of a token, or `bytes:` and its bytes if they are not UTF-8."""
    raw = grammars.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(grammars: Grammars, scored: Sequence[ScoredToken], top: int) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

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


def prompt_logprobs(grammars: Grammars, choice: Choice, top: int) -> list[dict[str, Any] | None]:
    """Return the `prompt_logprobs` of a choice in the format of vLLM: for each token, token id -> log-probability.

    Each position lists the prompt's token and the `top` most likely ones. The first token has None. `rank` is None if the prompt's
    token is not among the most likely ones.
    """

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": spell(grammars, token)}

    def position(scores: TokenLogprobs) -> dict[str, Any]:
        likeliest = {str(t): entry(t, logprob, rank) for rank, (t, logprob) in enumerate(scores.top[:top], 1)}
        token = str(scores.token)
        return {token: likeliest.get(token) or entry(scores.token, scores.logprob, None), **likeliest}

    return [None, *map(position, choice.prompt_logprobs)]


def completion_logprobs(
    grammars: Grammars, entries: Sequence[tuple[int, TokenLogprobs | None]], tokens: Sequence[int], top: int
) -> dict[str, Any]:
    """Return the `logprobs` of a completion choice.

    Args:
        grammars: Looks up the bytes of tokens.
        entries: (text offset, log-probabilities) of each token; the first token of a prompt has None.
        tokens: Token ids.
        top: Number of most likely tokens to list.
    """

    def likeliest(scores: TokenLogprobs | None) -> dict[str, float] | None:
        if scores is None:
            return None
        pairs = [*reversed(scores.top[:top]), (scores.token, scores.logprob)]  # different tokens may have the same text
        return {spell(grammars, token): max(logprob, LOWEST) for token, logprob in pairs}

    return {
        "tokens": [spell(grammars, token) for token in tokens],
        "token_logprobs": [None if s is None else max(s.logprob, LOWEST) for _, s in entries],
        "top_logprobs": [likeliest(s) for _, s in entries],
        "text_offset": [offset for offset, _ in entries],
    }
