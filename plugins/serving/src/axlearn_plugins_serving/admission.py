"""Validate requests before an engine accepts them."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from axlearn_core.errors import RequestError, nearest
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_transformer.cache_spec import check_prefix

MAX_LOGPROBS = 20
"""Maximum number of most likely tokens to report per position."""
MAX_FLOAT = float(np.finfo(np.float32).max)


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_context: int,
    max_logit_bias: int,
    adapters: Collection[str] = (),
    prefix: int = 0,
) -> None:
    """Check that the engine can handle a request.

    `prefix` is the number of leading tokens that attend in both directions.

    Raises:
        RequestError: If it cannot handle the request.
    """
    sampling = request.sampling
    _check_prompt(request.prompt, vocab_size)
    check_prefix(len(request.prompt), prefix)
    _check_context(len(request.prompt), 0 if request.embeds else sampling.max_tokens, max_context)
    if request.adapter is not None and request.adapter not in adapters:
        close = nearest(request.adapter, adapters, limit=1)
        raise RequestError(
            f"unknown adapter {request.adapter!r}"
            + (f"\n    did you mean: {close[0]}?" if close else "")
            + f"\n    known: {', '.join(sorted(adapters)) or 'no adapter is loaded'}"
        )
    _check_numbers(sampling, vocab_size)
    if len(sampling.logit_bias) > max_logit_bias:
        raise RequestError(f"logit_bias has {len(sampling.logit_bias)} tokens\n    expected: at most {max_logit_bias}")
    _check_tokens("logit_bias", sampling.logit_bias, vocab_size)
    _check_tokens("stop_tokens", sampling.stop_tokens, vocab_size)
    _check_tokens("bad_tokens", (token for tokens in sampling.bad_tokens for token in tokens), vocab_size)


def _check_prompt(prompt: Any, vocab_size: int) -> None:
    if not len(prompt):
        raise RequestError("the prompt is empty\n    expected: at least one token")
    try:
        tokens = np.asarray(prompt)
    except (ValueError, OverflowError):
        tokens = np.zeros(0)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError("the prompt is not a sequence of token ids\n    expected: integers")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        wrong = next(t for t in prompt if not 0 <= t < vocab_size)
        raise RequestError(f"the model has no token {wrong}\n    expected: 0 to {vocab_size - 1}")


def _check_context(length: int, max_tokens: int | None, max_context: int) -> None:
    new_tokens = 0 if max_tokens == 0 else 1
    if length + new_tokens > max_context:
        raise RequestError(
            f"the prompt has {length} tokens, but the context is {max_context}\n"
            f"    expected: at most {max_context - new_tokens}\n    fix: shorten the prompt"
        )


def _check_numbers(sampling: Sampling, vocab_size: int) -> None:
    checks: tuple[tuple[str, bool, str], ...] = (
        ("max_tokens", _is_int(sampling.max_tokens, 0, none=True), "an integer of at least 0, or None"),
        ("temperature", _is_number(sampling.temperature, 0, math.inf), "a finite number of at least 0"),
        ("top_k", _is_int(sampling.top_k, 1, none=True), "an integer of at least 1, or None"),
        ("top_p", _is_number(sampling.top_p, 0, 1), "a number from 0 to 1"),
        ("min_p", _is_number(sampling.min_p, 0, 1), "a number from 0 to 1"),
        ("seed", _is_int(sampling.seed, -(2**63), 2**64 - 1, none=True), "a 64-bit integer, or None"),
        ("presence_penalty", _is_number(sampling.presence_penalty, -math.inf, math.inf), "a finite number"),
        ("frequency_penalty", _is_number(sampling.frequency_penalty, -math.inf, math.inf), "a finite number"),
        (
            "repetition_penalty",
            _is_number(sampling.repetition_penalty, 0, MAX_FLOAT) and sampling.repetition_penalty > 0,
            "a finite number above 0",
        ),
        ("min_tokens", _is_int(sampling.min_tokens, 0, _most_tokens(sampling)), "0 to max_tokens"),
        ("prompt_logprobs", _is_prompt_logprobs(sampling.prompt_logprobs), f"0 to {MAX_LOGPROBS}, a bool, or None"),
        ("bad_tokens", all(len(tokens) > 0 for tokens in sampling.bad_tokens), "sequences of at least one token"),
        ("logprobs", _is_int(sampling.logprobs, 0, MAX_LOGPROBS, none=True), f"0 to {MAX_LOGPROBS}, or None"),
        (
            "sampling_logprobs",
            sampling.sampling_logprobs in ((True, False) if sampling.logprobs is not None else (False,)),
            "False, or a bool if logprobs is set",
        ),
        (
            "logit_bias",
            all(_is_number(value, -math.inf, math.inf) for value in sampling.logit_bias.values()),
            "finite numbers",
        ),
    )
    wrong = [(name, expected) for name, right, expected in checks if not right]
    if wrong:
        lines = [f"    {name}: got {getattr(sampling, name)!r}, expected {expected}" for name, expected in wrong]
        raise RequestError("out of range:\n" + "\n".join(lines))


def _most_tokens(sampling: Sampling) -> float:
    return math.inf if sampling.max_tokens is None else sampling.max_tokens


def _is_prompt_logprobs(value: Any) -> bool:
    return isinstance(value, bool) or _is_int(value, 0, MAX_LOGPROBS, none=True)


def _check_tokens(name: str, tokens: Iterable[Any], vocab_size: int) -> None:
    for token in tokens:
        if not _is_int(token, 0, vocab_size - 1):
            raise RequestError(f"{name} has the token {token!r}\n    expected: 0 to {vocab_size - 1}")


def _is_int(value: Any, low: int, high: float = math.inf, *, none: bool = False) -> bool:
    if value is None:
        return none
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and low <= int(value) <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    right = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    return right and math.isfinite(value) and low <= float(value) <= high
